"""The CUDA driver by ctypes: eleven calls, of which three are made at each launch.

`cuda-core` offers them with care, but pins an NVRTC of its own beside the one that torch pins, so the two
cannot be installed together; and a launch through ctypes with a packed argument costs 3 us.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from diagnose.core.errors import DiagnoseError

LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")

_OLD_DRIVER = (209, 218, 222)
"""No binary for the device, invalid PTX, unsupported PTX version: the driver is older than the compiler."""


class DriverError(DiagnoseError):
    """A call of the CUDA driver failed."""


class Driver:
    """The process's CUDA driver.

    Raises:
        OSError: If there is none.
        DriverError: If it cannot be initialized.
    """

    def __init__(self) -> None:
        self._library = _load()
        self._call("cuInit", ctypes.c_uint(0))

    def version(self) -> int:
        """The newest CUDA that the driver serves: 12010 is 12.1."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value

    def load(self, cubin: bytes, device: int) -> ctypes.c_void_p:
        """Loads machine code into the context that torch uses on a device; it stays for good."""
        module = ctypes.c_void_p()
        with self.context(device):
            self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def function(self, module: ctypes.c_void_p, name: str, device: int) -> ctypes.c_void_p:
        """An entry point of the code loaded on a device."""
        function = ctypes.c_void_p()
        with self.context(device):
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def blocks_per_multiprocessor(self, function: ctypes.c_void_p, threads: int, device: int) -> int:
        """How many blocks of so many threads are resident at once on one multiprocessor."""
        num = ctypes.c_int()
        with self.context(device):
            self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                ctypes.byref(num),
                function,
                ctypes.c_int(threads),
                ctypes.c_size_t(0),
            )
        return num.value

    def launch(
        self,
        function: ctypes.c_void_p,
        blocks: int,
        threads: int,
        stream: int,
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """Launches on a stream, in the context that is current.

        Args:
            function: The entry point.
            blocks: In the grid, along its only dimension.
            threads: In a block.
            stream: torch's `cuda_stream`.
            arguments: The address of each argument; the driver copies what they point to before it returns.
        """
        code = self._library.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), arguments, None
        )
        if code:
            self._raise("cuLaunchKernel", code)

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Makes the primary context of a device, which is torch's, current in this thread while open."""
        self._call("cuCtxPushCurrent_v2", self._primary(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @functools.cache  # noqa: B019 - there is one driver, and it lives as long as the process
    def _primary(self, device: int) -> ctypes.c_void_p:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        return context

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._raise(name, code)

    def _raise(self, name: str, code: int) -> None:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        advice = (
            " The driver may be older than the compiler that torch brought." if code in _OLD_DRIVER else ""
        )
        raise DriverError(f"{name} failed with code {code}: {words}.{advice}")


@functools.cache
def driver() -> Driver:
    """The driver, initialized.

    Raises:
        OSError: If there is none on this machine.
        DriverError: If it cannot be initialized.
    """
    return Driver()


def _load() -> ctypes.CDLL:
    failed = []
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failed.append(str(error))
    raise OSError("; ".join(failed))
