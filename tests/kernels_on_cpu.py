"""The kernels under real optimizers, on CPU tensors: what would be a GPU is emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diagnose.kernels._clip import CLIPPING
from diagnose.kernels._device import standing_in
from diagnose.kernels._kernels import kernel
from diagnose.kernels._nvrtc import NoCompiler
from diagnose.kernels._structs import Launch

from tests.emulated import EmulatedDevice

CPU = torch.device("cpu")


class CpuDevice:
    """An emulated device, and what was launched on it.

    Attributes:
        launched: The entry points, in order.
        told: How many words each launch carried that the table did not hold.
    """

    large_arguments = False

    def __init__(self, seed: int = 0) -> None:
        self._emulated = EmulatedDevice(seed)
        self.launched: list[str] = []
        self.told: list[int] = []

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
        self.told += [arg.num_told + arg.num_group_words for arg in args if isinstance(arg, Launch)]
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


def without(stem: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one kernel one that does not compile for this device."""
    compiled = device.resident_blocks

    def resident_blocks(name: str, entry: str, **how: Any) -> int:
        if name == stem:
            raise NoCompiler(f"{stem}: NVRTC has no image for sm_61.")
        return compiled(name, entry, **how)

    monkeypatch.setattr(device, "resident_blocks", resident_blocks)
