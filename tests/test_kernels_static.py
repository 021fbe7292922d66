"""What the compiler makes of the kernels: no spilled registers, wide accesses, on every architecture."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator

import diagnose.kernels
import pytest
from diagnose.kernels import _nvrtc
from diagnose.kernels._build import Image, build
from diagnose.kernels.base import Kernel

from diagnose.core.plugins import discover

KERNELS = discover(diagnose.kernels, Kernel)
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

# Of 65 536 registers: 80 let three blocks of 256 threads run at a time, 128 two. Kernels for one dtype pair
# fit the first; those for all pairs, and those that do more for each element, the second.
MOST_REGISTERS = {"adamw": 80, "sgd": 80, "norm": 64, "scale": 64}
MOST_REGISTERS_OF_OTHERS = 128

# Accesses of 16 bytes that one turn of the aligned loop takes: reads and writes.
WIDE = {
    ("adamw", "f32"): (4, 3),
    ("adamw", "bf16"): (4, 3),
    ("adamw", "f32-bf16"): (7, 6),
    ("sgd", "f32"): (3, 2),
    ("sgd", "bf16"): (3, 2),
    ("lion", "f32"): (3, 2),
    ("lamb", "f32"): (7, 3),
    ("adamw-8bit", "bf16"): (2, 1),
    ("norm", "all"): (12, 0),
    ("scale", "all"): (3, 3),
}


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skips where there is no NVRTC."""
    try:
        _nvrtc.nvrtc()
    except _nvrtc.NoCompiler as missing:
        pytest.skip(str(missing))


def compiled(name: str, variant: str, architecture: int) -> Image:
    """A kernel as it is loaded."""
    kernel = KERNELS[name]
    return build(kernel.stem, kernel.source(), architecture, kernel.variants[variant])


def check(name: str, variant: str, architecture: int) -> None:
    """Compares registers and spills with what is allowed."""
    image = compiled(name, variant, architecture)
    found = image.registers()
    assert set(found) == set(KERNELS[name].entries)
    most = MOST_REGISTERS.get(name, MOST_REGISTERS_OF_OTHERS)
    if variant == "all" and name not in ("norm", "scale"):
        most = 255  # all that a thread can have: what is loaded holds a few pairs at most
    for entry, (registers, spilled) in found.items():
        assert spilled == 0, f"{entry} ({variant}) spills {spilled} bytes on sm_{architecture}"
        assert registers <= most, f"{entry} ({variant}) takes {registers} registers on sm_{architecture}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name, variant", [("adamw", "f32"), ("norm", "all"), ("patch", "many")])
def test_what_most_steps_run_spills_nothing_on_any_architecture(
    name: str, variant: str, architecture: int
) -> None:
    check(name, variant, architecture)


@pytest.mark.parametrize("name, variant", [key for key in WIDE if key != ("adamw", "f32")])
def test_each_kernel_spills_nothing_on_a_datacentre_card(name: str, variant: str) -> None:
    check(name, variant, 90)


@pytest.mark.extended
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_no_variant_spills_on_any_architecture(name: str, architecture: int) -> None:
    for variant in KERNELS[name].variants:
        check(name, variant, architecture)


def code_sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The machine code in an ELF file, by the name of the function."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        start = names + header[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), cubin[header[4] : header[4] + header[5]]


def wide_accesses(code: bytes) -> Counter[str]:
    """Loads from and stores to global memory by width in bits.

    Since Volta an instruction has 16 bytes: the low 12 bits are its operation (LDG 0x981, STG 0x986), bits
    73 to 75 the width of an access, 4 for 32 bits, 5 for 64 and 6 for 128. Accesses to what may also be
    local or shared memory are other operations, and count nothing.
    """
    found: Counter[str] = Counter()
    for low, high in struct.iter_unpack("<2Q", code):
        operation = {0x981: "load", 0x986: "store"}.get(low & 0xFFF)
        width = {4: 32, 5: 64, 6: 128}.get(high >> 9 & 7)
        if operation and width:
            found[f"{operation} {width}"] += 1
    return found


@pytest.mark.parametrize("name, variant", WIDE)
def test_memory_is_moved_16_bytes_at_a_time(name: str, variant: str) -> None:
    found: Counter[str] = Counter()
    for _, code in code_sections(compiled(name, variant, 90).cubin):
        found += wide_accesses(code)
    reads, writes = WIDE[name, variant]
    assert found["load 128"] >= reads
    assert found["store 128"] >= writes


def test_accesses_are_counted_by_their_width() -> None:
    image = build(
        "widths",
        'extern "C" __global__ void widths(const float4* a, const float2* b, const float* c, float4* d) {'
        " const int i = threadIdx.x; float4 four = a[i]; four.x += b[i].x + b[i].y + c[i]; d[i] = four; }",
        90,
    )
    ((name, code),) = code_sections(image.cubin)
    assert name == "widths"
    assert wide_accesses(code) == {"load 128": 1, "load 64": 1, "load 32": 1, "store 128": 1}
