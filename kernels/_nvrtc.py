"""NVRTC, NVIDIA's compiler as a library, by ctypes: found where torch or the system has it.

A CUDA build of torch brings the NVRTC that fits it and the driver it was made for, as a package of its own
(`nvidia/cu13/lib`, `nvidia/cuda_nvrtc/lib`) or inside `torch/lib`. A toolkit is not needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from diagnose.core.errors import DiagnoseError

OLDEST = (12, 6)
"""The oldest NVRTC that the sources were compiled with."""


class NoCompiler(DiagnoseError):
    """There is no NVRTC that can compile for the device."""


class CompileError(DiagnoseError):
    """NVRTC refused a source; the message holds its log."""


class Nvrtc:
    """One loaded NVRTC.

    Attributes:
        path: The library's file, or the name by which the system's loader found it.
        version: Major and minor.
        architectures: What it compiles for: 90 is sm_90.

    Raises:
        OSError: If the library, or the one beside it that holds its built-in functions, cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if "/" in path else ():
            # NVRTC opens it by its bare name, which succeeds only if it is loaded already.
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = path
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)
        num = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(num)))
        found = (ctypes.c_int * num.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found))
        self.architectures = tuple(sorted(found))

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def target(self, architecture: int) -> str | None:
        """What to compile for so that a device of `architecture` runs it.

        Returns:
            `sm_90` for machine code, which runs on later devices of the same major number too; `compute_90`
            for a device later than all that the compiler knows, whose driver compiles it on; `None` for one
            that is older or in between.
        """
        fits = [each for each in self.architectures if each // 10 == architecture // 10]
        nearest = max((each for each in fits if each <= architecture), default=None)
        if nearest is not None:
            return f"sm_{nearest}"
        newest = max(self.architectures)
        return f"compute_{newest}" if architecture > newest else None

    def compile(self, name: str, source: str, target: str, flags: Sequence[str]) -> tuple[bytes, str]:
        """Compiles one source to what the driver loads.

        Returns:
            The code and the log, which holds what the flag `--ptxas-options=-v` asks for where the target
            is a device's machine code.

        Raises:
            CompileError: If the source does not compile.
        """
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), 0, None, None
            )
        )
        try:
            given = [f"--gpu-architecture={target}", *flags]
            options = (ctypes.c_char_p * len(given))(*(flag.encode() for flag in given))
            code = self._library.nvrtcCompileProgram(program, len(given), options)
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if code:
                raise CompileError(f"{name} does not compile for {target} with {self}:\n{log}")
            return self._bytes("CUBIN" if target.startswith("sm_") else "PTX", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, text))
        return text.raw

    def _check(self, code: int) -> None:
        if code:
            raise CompileError(f"{self.path}: {self._library.nvrtcGetErrorString(code).decode()}")


@functools.cache
def nvrtc() -> Nvrtc:
    """The NVRTC to use: torch's own before the system's.

    Raises:
        NoCompiler: If there is none, or only older ones than `OLDEST`.
    """
    tried = []
    for path in candidates():
        try:
            found = Nvrtc(path)
        except (OSError, AttributeError, CompileError) as error:
            tried.append(f"{path}: {error}")
            continue
        if found.version >= OLDEST:
            return found
        tried.append(f"{found}: older than {OLDEST[0]}.{OLDEST[1]}")
    raise NoCompiler(
        "kernels: no NVRTC to compile with. A CUDA build of torch brings one; or pip install "
        "nvidia-cuda-nvrtc. Tried: " + "; ".join(tried)
    )


def candidates() -> Iterator[str]:
    """Where an NVRTC may be, the likeliest first: files that exist, then names for the system's loader."""
    nvidia = importlib.util.find_spec("nvidia")
    torch = importlib.util.find_spec("torch")
    folders = [
        Path(root) / below
        for root in (nvidia.submodule_search_locations or () if nvidia else ())
        for below in ("cu13/lib", "cuda_nvrtc/lib", "cu12/lib")
    ]
    if torch is not None and torch.origin is not None:
        folders.append(Path(torch.origin).parent / "lib")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            folders.append(Path(os.environ[variable]) / "lib64")
    folders.append(Path("/usr/local/cuda/lib64"))
    built_for = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    torch_major = (built_for or "").partition(".")[0]
    files: list[Path] = []
    for folder in folders:
        files += [path for path in sorted(folder.glob("libnvrtc*.so*")) if _LIBRARY.match(path.name)]
    # Code of a newer compiler than torch's may ask for a newer driver than the one that torch runs on.
    named = [Path(name) for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")]
    yield from map(str, sorted([*files, *named], key=lambda path: _major(path) != torch_major))


_LIBRARY = re.compile(r"libnvrtc(-[0-9a-f]{8})?\.so(\.\d+)*$")
"""Wheels of torch carry a hash in the name; `libnvrtc-builtins.so` is another library."""


def _major(path: Path) -> str:
    number = re.search(r"\.so\.(\d+)", path.name)
    return number.group(1) if number else ""
