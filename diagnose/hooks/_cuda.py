"""A CUDA device, as `_device.Device` wants one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

from diagnose.hooks._device import Event, Stream

DRIVERS = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")

RELAXED = 2
"""`CU_STREAM_CAPTURE_MODE_RELAXED`."""


class CudaDevice:
    """One CUDA device, by torch's events.

    Args:
        index: Its number in this process.
    """

    def __init__(self, index: int) -> None:
        from torch import cuda

        self.index = index
        self._cuda = cuda
        # The classes that `cuda.Event` wraps: a step has a dozen of these calls, and each counts.
        base: Any = cuda.Event.__mro__[1]
        self.record = base.record
        self.has_passed = base.query
        self.ms_between = base.elapsed_time
        self.is_capturing = cuda.is_current_stream_capturing

    def current_stream(self) -> Stream:
        return self._cuda.current_stream(self.index)

    def new_event(self) -> Event:
        event = self._cuda.Event(enable_timing=True)
        # Never destroyed: a forked child that ends would ask its parent's device, and abort.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
        return event

    def begin_reading(self) -> None:
        """See `Device`. While one thread captures a graph, CUDA lets no other ask for an event, and breaks
        the capture if it does; unless that other thread has said that it knows what it does. Torch's own
        threads say it in the same way, where Python cannot reach.

        Raises:
            OSError: If there is no such driver, or it refuses.
        """
        self._cuda.set_device(self.index)  # of this thread alone
        mode = ctypes.c_int(RELAXED)
        refused = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        if refused:
            raise OSError(f"cuThreadExchangeStreamCaptureMode: error {refused}")


def cuda_in_use() -> bool:
    """Whether this process has initialised CUDA; does not initialise it."""
    torch: Any = sys.modules["torch"]
    return bool(torch.cuda.is_initialized())


def accelerator_of(modules: Iterable[Any]) -> Any:
    """Returns the `torch.device` of the parameters of the first of these modules that has them beyond the
    CPU, or `None`."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.device.type not in ("cpu", "meta"):
                return parameter.device
    return None


def index_of(modules: Iterable[Any]) -> int | None:
    """Returns the number of the CUDA device that `accelerator_of` returns, or `None`."""
    device = accelerator_of(modules)
    return device.index if device is not None and device.type == "cuda" else None


def device_of(modules: Iterable[Any]) -> CudaDevice | None:
    """Returns the CUDA device that `accelerator_of` returns, or `None`."""
    index = index_of(modules)
    return CudaDevice(index) if index is not None else None


def _driver() -> Any:
    for name in DRIVERS:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            missing = error
    raise missing
