"""The kernels under real optimizers, on CPU tensors: what would be a GPU is emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from diagnose.kernels._clip import CLIPPING
from diagnose.kernels._device import standing_in
from diagnose.kernels._kernels import kernel

from tests.emulated import EmulatedDevice

CPU = torch.device("cpu")


class CpuDevice:
    """An emulated device, and what was launched on it.

    Attributes:
        launched: The entry points, in order.
    """

    large_arguments = False

    def __init__(self, seed: int = 0) -> None:
        self._emulated = EmulatedDevice(seed)
        self.launched: list[str] = []

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
        """See `Device.launch`. One library, for every variant, serves all tests."""
        self.launched.append(entry)
        self._emulated.launch(kernel(stem), entry, grid=grid, block=block, args=args)

    def resident_blocks(
        self, stem: str, entry: str, *, block: int, defines: Mapping[str, int] | None = None
    ) -> int:
        """See `Device.resident_blocks`. Few, so that blocks go around."""
        return 3


@contextmanager
def kernels_on_cpu(seed: int = 0) -> Iterator[CpuDevice]:
    """Lets the emulated device take the part of a GPU."""
    device = CpuDevice(seed)
    with standing_in(CPU, device):
        try:
            yield device
        finally:
            for swap in list(CLIPPING.swaps):
                swap.remove()
