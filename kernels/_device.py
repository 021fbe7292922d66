"""What runs kernels on the tensors of one device: everything above a launch knows only this."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from diagnose.kernels._build import Image, build
from diagnose.kernels._driver import Driver, driver
from diagnose.kernels._kernels import kernel
from diagnose.kernels._nvrtc import NoCompiler, nvrtc

from diagnose.core.errors import DiagnoseError

OLDEST_ARCHITECTURE = 75
"""The sources are compiled and checked from sm_75 on."""

LARGE_ARGUMENTS = 12010
"""The first version of the driver's interface (CUDA 12.1) that takes 32 KB of arguments."""

FAILURES = (OSError, RuntimeError, DiagnoseError)
"""How something of ours fails: no driver, no memory, a refused launch."""


class Device(Protocol):
    """Runs kernels on memory that tensors of one `torch.device` lie in.

    Attributes:
        large_arguments: Whether a launch takes 32 KB of arguments, not 4.
    """

    large_arguments: bool

    def launch(
        self,
        stem: str,
        entry: str,
        *,
        grid: int,
        block: int,
        args: Sequence[ctypes.Structure],
        defines: Mapping[str, int] | None = None,
    ) -> None:
        """Queues an entry point on torch's current stream of the device."""

    def resident_blocks(
        self, stem: str, entry: str, *, block: int, defines: Mapping[str, int] | None = None
    ) -> int:
        """How many blocks run at once: a larger grid gains nothing."""


class Gpu:
    """One CUDA device.

    Attributes:
        images: What was built for it so far, by kernel, entry point and defines.
    """

    def __init__(self, index: int) -> None:
        properties = torch.cuda.get_device_properties(index)
        self._index = index
        self.large_arguments = driver().version() >= LARGE_ARGUMENTS
        self._architecture = 10 * properties.major + properties.minor
        self._multiprocessors = properties.multi_processor_count
        self._functions: dict[tuple[str, str, tuple[tuple[str, int], ...]], ctypes.c_void_p] = {}
        self.images: dict[tuple[str, tuple[tuple[str, int], ...]], Image] = {}
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], ctypes.c_void_p] = {}

    def launch(
        self,
        stem: str,
        entry: str,
        *,
        grid: int,
        block: int,
        args: Sequence[ctypes.Structure],
        defines: Mapping[str, int] | None = None,
    ) -> None:
        function = self._function(stem, entry, defines or {})
        addresses = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        stream = torch.cuda.current_stream(self._index).cuda_stream
        with self._driver.context(self._index):
            self._driver.launch(function, grid, block, stream, addresses)

    def resident_blocks(
        self, stem: str, entry: str, *, block: int, defines: Mapping[str, int] | None = None
    ) -> int:
        function = self._function(stem, entry, defines or {})
        each = self._driver.blocks_per_multiprocessor(function, block, self._index)
        return max(1, each) * self._multiprocessors

    @property
    def _driver(self) -> Driver:
        return driver()

    def _function(self, stem: str, entry: str, defines: Mapping[str, int]) -> ctypes.c_void_p:
        variant = tuple(sorted(defines.items()))
        found = self._functions.get((stem, entry, variant))
        if found is None:
            module = self._modules.get((stem, variant))
            if module is None:
                image = build(stem, kernel(stem).source(), self._architecture, defines)
                module = self._driver.load(image.cubin, self._index)
                self.images[stem, variant] = image
                self._modules[stem, variant] = module
            found = self._driver.function(module, entry, self._index)
            self._functions[stem, entry, variant] = found
        return found


_STAND_INS: dict[torch.device, Device] = {}
_GPUS: dict[int, Gpu] = {}


@contextmanager
def standing_in(place: torch.device, device: Device) -> Iterator[None]:
    """Lets `device` run the kernels for the tensors at `place` while open: how tests run them on a CPU."""
    _STAND_INS[place] = device
    try:
        yield
    finally:
        del _STAND_INS[place]


def why_none(place: torch.device) -> str:
    """Why no kernel can run on tensors at `place`, in words; empty if one can."""
    if place in _STAND_INS:
        return ""
    if place.type != "cuda":
        return f"the parameters are on {place.type}, and the kernels are for CUDA; torch's own serve there"
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels are for CUDA"
    return _why_no_gpu(place.index)


@functools.cache
def _why_no_gpu(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    architecture = 10 * major + minor
    if architecture < OLDEST_ARCHITECTURE:
        return f"sm_{architecture} is older than sm_{OLDEST_ARCHITECTURE}"
    try:
        if nvrtc().target(architecture) is None:
            raise NoCompiler(f"{nvrtc()} knows no sm_{architecture}")
        # Only a trial shows whether this driver takes what this compiler makes. Later it would end a step.
        device_at(torch.device("cuda", index)).resident_blocks("patch", "patch", block=32)
    except (OSError, DiagnoseError) as error:
        return str(error)
    return ""


def device_at(place: torch.device) -> Device:
    """What runs kernels on tensors at `place`, where `why_none` says nothing."""
    found = _STAND_INS.get(place)
    if found is not None:
        return found
    if place.index not in _GPUS:
        _GPUS[place.index] = Gpu(place.index)
    return _GPUS[place.index]


def images() -> list[Image]:
    """What was built in this process, on all devices."""
    return [image for gpu in _GPUS.values() for image in gpu.images.values()]
