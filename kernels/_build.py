"""Turns a kernel's source into machine code for one architecture, and keeps it on the disk.

An entry of the cache is found by the hash of everything that the code depends on, so none is ever stale,
and holds its own hash, so a torn or altered one is noticed. Many processes may build the same at once:
each writes a file of its own and renames it, which replaces an entry with an equal one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from diagnose.kernels._nvrtc import NoCompiler, nvrtc

FLAGS = (
    "--std=c++17",
    "--fmad=false",  # the sources say where to fuse: every compiler then rounds alike
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",  # registers and spills, in the log
)

_NOTHING: Mapping[str, int] = MappingProxyType({})

FORMAT = 1
"""Of an entry in the cache; part of its key."""

_RESOURCES = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<spills>\d+) bytes spill stores.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Machine code of one source.

    Attributes:
        stem: Name of the source.
        target: What it was compiled for: `sm_90`, or `compute_90` if the driver has to compile it on.
        compiler: Name, version and place of the compiler.
        cubin: The machine code, an ELF file; PTX for a device that the compiler does not know.
        log: What the compiler printed.
        from_cache: Whether it was read from the disk, not compiled.
    """

    stem: str
    target: str
    compiler: str
    cubin: bytes
    log: str
    from_cache: bool

    def registers(self) -> dict[str, tuple[int, int]]:
        """Registers per thread and bytes spilled, by entry point."""
        return {
            each["name"]: (int(each["registers"]), int(each["spills"]))
            for each in _RESOURCES.finditer(self.log)
        }


def build(stem: str, source: str, architecture: int, defines: Mapping[str, int] = _NOTHING) -> Image:
    """Returns the machine code of a source for a device of `architecture`, from the cache if it holds it.

    Args:
        stem: Name of the source, for messages.
        source: All of it: it includes nothing.
        architecture: 90 is sm_90.
        defines: Macros to set.

    Raises:
        NoCompiler: If no NVRTC is found, or it does not know a device of this kind.
        CompileError: If the source does not compile.
    """
    compiler = nvrtc()
    target = compiler.target(architecture)
    if target is None:
        known = ", ".join(f"sm_{each}" for each in compiler.architectures)
        raise NoCompiler(f"{stem}: {compiler} has no image for sm_{architecture}; it has {known}")
    flags = [*FLAGS, *(f"--define-macro={name}={value}" for name, value in sorted(defines.items()))]
    depends = json.dumps([FORMAT, source, target, compiler.version, flags])
    path = cache_folder() / f"{hashlib.sha256(depends.encode()).hexdigest()}.cubin"
    kept = _read(path)
    if kept is not None:
        cubin, log = kept
    else:
        cubin, log = compiler.compile(f"{stem}.cu", source, target, flags)
        _write(path, cubin, log)
    return Image(
        stem=stem,
        target=target,
        compiler=str(compiler),
        cubin=cubin,
        log=log,
        from_cache=kept is not None,
    )


def cache_folder() -> Path:
    """Where entries are kept: the user's folder for caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "diagnose" / "kernels"


def _read(path: Path) -> tuple[bytes, str] | None:
    """The cubin and the log of an entry; `None` where there is none that can be used."""
    try:
        digest, _, rest = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"kernels: {path} cannot be read ({error.strerror}); compiled anew")
        return None
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        _warn_once(f"kernels: {path} is damaged; compiled anew")
        return None
    size, _, body = rest.partition(b"\n")
    return body[: int(size)], body[int(size) :].decode()


def _write(path: Path, cubin: bytes, log: str) -> None:
    rest = f"{len(cubin)}\n".encode() + cubin + log.encode()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem[:16], delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _warn_once(
            f"kernels: {path.parent} cannot be written ({error.strerror}); every process compiles anew. "
            "Name another folder in XDG_CACHE_HOME."
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
