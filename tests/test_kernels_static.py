"""What compilers make of the kernels: no spilled registers, wide accesses, on every architecture."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator

import diagnose.kernels
import pytest
from diagnose.kernels import _build, _nvrtc
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
    ("adamw", "f32-many"): (4, 3),
    ("adamw", "bf16"): (4, 3),
    ("adamw", "f32-bf16"): (7, 6),
    ("sgd", "f32"): (3, 2),
    ("sgd", "bf16"): (3, 2),
    ("lion", "f32"): (3, 2),
    ("lamb", "f32"): (7, 3),
    ("adamw-8bit", "bf16"): (2, 1),
    ("norm", "all"): (12, 0),
    ("norm", "many"): (12, 0),
    ("scale", "all"): (3, 3),
}
ONE_OF_EACH = {name: (name, variant) for name, variant in reversed(WIDE)}
ONE_OF_EACH["patch"] = ("patch", "many")

LOADS, STORES = (0x381, 0x981), (0x386, 0x986)
"""Operations on global memory, on sm_75 and after."""


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skips where there is no NVRTC."""
    try:
        _nvrtc.nvrtc()
    except _nvrtc.NoCompiler as missing:
        pytest.skip(str(missing))


SPILLED = {("lion", "bf16-copy", 120): 8}
"""Bytes that a thread may keep outside of its registers: two words, in one variant on consumers' cards."""


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
        most_spilled = SPILLED.get((name, variant, architecture), 0)
        assert spilled <= most_spilled, f"{entry} ({variant}) spills {spilled} bytes on sm_{architecture}"
        assert registers <= most, f"{entry} ({variant}) takes {registers} registers on sm_{architecture}"


def check_wide(name: str, variant: str, architecture: int) -> None:
    """Compares accesses of 16 bytes with what there has to be."""
    reads, writes = WIDE[name, variant]
    found: Counter[str] = Counter()
    for _, code in code_sections(compiled(name, variant, architecture).cubin):
        found += wide_accesses(code)
    assert found["load 128"] >= reads
    assert found["store 128"] >= writes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_spills_nothing_and_moves_16_bytes_at_a_time_on_every_architecture(
    name: str, architecture: int
) -> None:
    name, variant = ONE_OF_EACH[name]
    check(name, variant, architecture)
    if (name, variant) in WIDE:
        check_wide(name, variant, architecture)


@pytest.mark.parametrize("name, variant", [key for key in WIDE if key not in ONE_OF_EACH.values()])
def test_other_variants_do_so_on_a_datacentre_card(name: str, variant: str) -> None:
    check(name, variant, 90)
    check_wide(name, variant, 90)


@pytest.mark.extended
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_no_variant_spills_on_any_architecture(name: str, architecture: int) -> None:
    for variant in KERNELS[name].variants:
        check(name, variant, architecture)
        if (name, variant) in WIDE:
            check_wide(name, variant, architecture)


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

    Since Volta an instruction has 16 bytes: the low 12 bits are its operation, bits 73 to 75 the width of
    an access, 4 for 32 bits, 5 for 64 and 6 for 128. Accesses to what may also be local or shared memory
    are other operations, and count nothing.
    """
    operations = {**dict.fromkeys(LOADS, "load"), **dict.fromkeys(STORES, "store")}
    found: Counter[str] = Counter()
    for low, high in struct.iter_unpack("<2Q", code):
        operation = operations.get(low & 0xFFF)
        width = {4: 32, 5: 64, 6: 128}.get(high >> 9 & 7)
        if operation and width:
            found[f"{operation} {width}"] += 1
    return found


@pytest.mark.parametrize("architecture", [75, 80, 120])
def test_accesses_are_counted_by_their_width(architecture: int) -> None:
    image = build(
        "widths",
        'extern "C" __global__ void widths(const float4* a, const float2* b, const float* c, float4* d) {'
        " const int i = threadIdx.x; float4 four = a[i]; four.x += b[i].x + b[i].y + c[i]; d[i] = four; }",
        architecture,
    )
    ((name, code),) = code_sections(image.cubin)
    assert name == "widths"
    assert wide_accesses(code) == {"load 128": 1, "load 64": 1, "load 32": 1, "store 128": 1}


@pytest.mark.parametrize("name", KERNELS)
def test_the_oldest_compiler_that_is_used_makes_as_good_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [path for path in _nvrtc.candidates() if "/" in path]
    oldest = next((each for each in map(_nvrtc.Nvrtc, files) if each.version == _nvrtc.OLDEST), None)
    if oldest is None:
        pytest.skip("needs NVRTC 12.6: pip install nvidia-cuda-nvrtc-cu12==12.6.85")
    monkeypatch.setattr(_build, "nvrtc", lambda: oldest)
    name, variant = ONE_OF_EACH[name]
    assert compiled(name, variant, 80).compiler == str(oldest)
    check(name, variant, 80)
    if (name, variant) in WIDE:
        check_wide(name, variant, 80)
