"""Parameters sharded by FSDP2: kernels step this rank's parts, and clipping stays a matter of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diagnose.kernels import _optimizers
from diagnose.kernels._swap import CannotSwap, support, swap, unswap
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.kernels_on_cpu import CpuDevice, loss_of
from tests.running import run_ranks

pytest_plugins = ("tests.kernels_on_cpu",)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One rank."""
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")
    pytest.importorskip("torch.distributed.fsdp")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def network(mesh: Any) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(mesh: Any, make: Any, *, on: bool, clips: bool, steps: int = 3) -> list[torch.Tensor]:
    model = network(mesh)
    optimizer = make(model.parameters())
    if on:
        taken = swap(optimizer)
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        if clips:
            clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    if on:
        assert taken.stepper.left == []
        unswap(optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *states]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_sharded_parameters_train_as_by_torch_and_torch_clips_them(
    name: str, clips: bool, mesh: Any, device: CpuDevice
) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        further = {"momentum": 0.9} if name == "SGD" else {}
        made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=1e-2, **further)
        return made

    theirs, ours = (trained(mesh, make, on=on, clips=clips) for on in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    assert device.launched == [name.lower()] * 3, "the norm is a sum over ranks, which torch makes"


def test_deferring_clipping_of_sharded_parameters_is_refused_in_words(mesh: Any, device: CpuDevice) -> None:
    optimizer = torch.optim.AdamW(network(mesh).parameters())
    assert support(optimizer) == []
    with pytest.raises(CannotSwap, match="sum over ranks, which torch makes: clipping cannot be deferred"):
        swap(optimizer, clip="deferred")
    assert not optimizer._optimizer_step_pre_hooks


def test_what_needs_a_norm_of_a_whole_parameter_leaves_a_sharded_one_to_its_plain_step(
    mesh: Any, device: CpuDevice
) -> None:
    model = network(mesh)
    optimizer = _optimizers.Lamb(model.parameters(), lr=1e-2, max_grad_norm=0.0)
    model(torch.ones(4, 50)).square().mean().backward()
    optimizer.step()
    assert device.launched == []
    assert len(optimizer.state) == 4


def test_a_gradient_that_is_still_to_be_summed_over_ranks_is_left_to_torch(
    mesh: Any, device: CpuDevice
) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    param = nn.Parameter(DTensor.from_local(torch.ones(6), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([param], lr=0.5)
    taken = swap(optimizer)
    for placement, launched in ((Replicate(), 1), (Partial(), 1)):
        param.grad = DTensor.from_local(torch.ones(6), mesh, [placement])
        optimizer.step()
        assert len(device.launched) == launched
    assert taken.stepper.left
    assert torch.equal(param.full_tensor(), torch.zeros(6))


TWO_RANKS = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from diagnose.kernels._swap import swap
from tests.kernels_on_cpu import kernels_on_cpu
from tests.test_kernels_shards import trained
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
make = lambda params: torch.optim.AdamW(params, lr=1e-2)
theirs = trained(mesh, make, on=False, clips=True)
with kernels_on_cpu() as device:
    ours = trained(mesh, make, on=True, clips=True)
torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
assert device.launched == ["adamw"] * 3, device.launched
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_two_ranks_step_their_shards_as_by_torch() -> None:
    """Of three rows and two ranks one rank has two, the other one."""
    run_ranks("-c", TWO_RANKS)
