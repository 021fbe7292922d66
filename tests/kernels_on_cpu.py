"""The kernels under real optimizers, on CPU tensors: what would be a GPU is emulated."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diagnose.kernels._clip import CLIPPING
from diagnose.kernels._device import standing_in
from diagnose.kernels._driver import DriverError
from diagnose.kernels._kernels import kernel
from diagnose.kernels._nvrtc import NoCompiler
from diagnose.kernels._structs import Launch, LaunchMany
from torch import nn

from tests.emulated import EmulatedDevice

CPU = torch.device("cpu")


class CpuDevice:
    """An emulated device, and what was launched on it.

    Attributes:
        large_arguments: See `Device`.
        launched: The entry points, in order.
        told: How many words each launch carried that the table did not hold.
        variants: What was launched, and for what it was compiled: the code that a GPU would run.
    """

    def __init__(self, seed: int = 0, *, large_arguments: bool = False) -> None:
        self._emulated = EmulatedDevice(seed)
        self.large_arguments = large_arguments
        self.launched: list[str] = []
        self.told: list[int] = []
        self.variants: list[tuple[str, dict[str, int]]] = []

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
        """See `Device.launch`."""
        defines = dict(defines or {})
        self.launched.append(entry)
        self.variants.append((entry, defines))
        self.told += [
            arg.num_told + arg.num_group_words for arg in args if isinstance(arg, Launch | LaunchMany)
        ]
        self._emulated.launch(kernel(stem), entry, grid=grid, block=block, args=args, defines=defines)

    def resident_blocks(
        self, stem: str, entry: str, *, block: int, defines: Mapping[str, int] | None = None
    ) -> int:
        """See `Device.resident_blocks`. Few, so that blocks go around."""
        return 3


@contextmanager
def kernels_on_cpu(seed: int = 0, *, large_arguments: bool = False) -> Iterator[CpuDevice]:
    """Lets the emulated device take the part of a GPU."""
    device = CpuDevice(seed, large_arguments=large_arguments)
    with standing_in(CPU, device):
        try:
            yield device
        finally:
            for swap in list(CLIPPING.swaps):
                swap.remove()


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu() as device:
        yield device


def without(stem: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one kernel one that does not compile for this device."""
    compiled = device.resident_blocks

    def resident_blocks(name: str, entry: str, **how: Any) -> int:
        if name == stem:
            raise NoCompiler(f"{stem}: NVRTC has no image for sm_61.")
        return compiled(name, entry, **how)

    monkeypatch.setattr(device, "resident_blocks", resident_blocks)


def failing(stem: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """Makes the device refuse each launch of one kernel but the first ones."""
    launched, left = device.launch, iter(range(after))

    def launch(name: str, entry: str, **how: Any) -> None:
        if name == stem and next(left, None) is None:
            raise DriverError("cuLaunchKernel failed with code 701: too many resources requested.")
        launched(name, entry, **how)

    monkeypatch.setattr(device, "launch", launch)


Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam-maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True, eps=0),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd-nesterov": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd-dampening": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5),
}
STATEFUL = [name for name in MAKERS if name != "sgd"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3))


def network_and(name: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A network and the optimizer of that name."""
    model = network()
    return model, MAKERS[name](model.parameters())


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    """Over images that are the same for the same number."""
    image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(image).square().mean()
    return loss


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (loss_of(model, number) * scale).backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights and all of the optimizer's state, as a checkpoint shows it."""
    state = optimizer.state_dict()["state"]
    held = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *held]]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Bit for bit."""
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(ours, theirs, strict=True))


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
