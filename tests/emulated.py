"""Runs the unmodified sources of `kernels/` on the CPU: `emulation/cuda.h` stands in for a GPU.

    device = EmulatedDevice(seed=1)
    device.launch("adamw", "adamw", grid=4, block=256, args=(launch,))

Each kernel is compiled once per set of defines, by g++, into a library that later runs find again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

KERNELS = Path(__file__).parents[1] / "kernels"
HEADER = Path(__file__).parent / "emulation" / "cuda.h"
CACHE = Path(tempfile.gettempdir()) / f"diagnose-emulation-{os.getuid()}"

# The bits of the GPU: no contraction of a * b + c, and types that are read as words.
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",  # Ubuntu's g++ sets it: a jump from one fiber's stack to another's would abort
    "-w",
)
SANITIZERS = (
    "-O0",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)

# One C function per entry: copies the arguments, runs the grid, returns what went wrong or nothing.
ENTRY = """
static void body_of_{name}(void** args) {{ emulation::call({name}, args); }}
extern "C" const char* launch_{name}(unsigned grid, unsigned block, void** args, uint64_t seed) {{
    emulation::launch(body_of_{name}, grid, block, args, seed);
    return emulation::error.empty() ? nullptr : emulation::error.c_str();
}}
"""


class EmulationError(Exception):
    """A kernel did what a GPU would not forgive: a barrier missed, a wide access misaligned."""


def entries_of(source: str) -> list[str]:
    """The names of the kernels that a source defines."""
    heads = source.split('extern "C" __global__ void __launch_bounds__(')[1:]
    return [head.split(")", 1)[1].split("(", 1)[0].strip() for head in heads]


@functools.cache
def library_path(
    stem: str, defines: tuple[tuple[str, int], ...] = (), *, sanitized: bool = False, folder: Path = KERNELS
) -> Path:
    """Compiles `stem`.cu of `folder` for the CPU, unless that was done before, and returns the library."""
    text = (folder / f"{stem}.cu").read_text(encoding="utf-8")
    shared = b"".join(path.read_bytes() for path in (HEADER, *sorted(folder.glob("*.cuh"))))
    wrapper = f'#include "{stem}.cu"\n' + "".join(ENTRY.format(name=e) for e in entries_of(text))
    flags = (
        *FLAGS,
        *(SANITIZERS if sanitized else ()),
        *(f"-D{name}={value}" for name, value in defines),
    )
    key = hashlib.sha256(shared + text.encode() + wrapper.encode() + repr(flags).encode()).hexdigest()[:24]
    library = CACHE / f"{stem}-{key}.so"
    CACHE.mkdir(mode=0o700, exist_ok=True)
    if CACHE.stat().st_uid != os.getuid():
        raise EmulationError(f"{CACHE} belongs to another user: nothing is loaded from it; set TMPDIR")
    if not library.exists():
        # Under a name of its own first: other processes may compile the same.
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            built = Path(scratch) / library.name
            folders = [f"-I{folder}", f"-I{KERNELS}"]
            command = ["g++", *flags, *folders, "-include", str(HEADER), "-x", "c++", "-", "-o", str(built)]
            done = subprocess.run(command, input=wrapper, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulationError(f"{stem}.cu does not compile:\n{done.stderr}")
            built.rename(library)
    return library


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Loads a library once."""
    return ctypes.CDLL(str(path))


class EmulatedDevice:
    """Launches kernels on memory of the CPU.

    Attributes:
        seed: Decides the order in which threads and blocks run. Every launch takes the next one, so that a
            sequence of launches is repeated by the same seed.
    """

    def __init__(self, seed: int = 0, *, folder: Path = KERNELS) -> None:
        self.seed = seed
        self._folder = folder

    def launch(
        self,
        kernel: Any,
        entry: str,
        grid: int,
        block: int,
        args: Sequence[Any],
        defines: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Runs a grid to its end.

        Args:
            kernel: The stem of a file in `kernels/`, or a `Kernel`.
            args: One ctypes object per parameter of the kernel; structures go by value.

        Raises:
            EmulationError: If the threads cannot go on, or an access is misaligned.
        """
        stem = str(getattr(kernel, "name", kernel)).replace("-", "_")
        library = load(library_path(stem, tuple(sorted(defines.items())), folder=self._folder))
        function = getattr(library, f"launch_{entry}")
        function.restype = ctypes.c_char_p
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        self.seed += 1
        problem = function(
            ctypes.c_uint(grid), ctypes.c_uint(block), pointers, ctypes.c_uint64(self.seed & (2**64 - 1))
        )
        if problem is not None:
            raise EmulationError(f"{entry}: {problem.decode()}")
