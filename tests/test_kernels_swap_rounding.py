"""Rounding by chance under live optimizers: replicas agree, no dice are thrown twice, checkpoints go on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnose.kernels._dice import dice_of
from diagnose.kernels._optimizer_8bit import AdamW8bit
from diagnose.kernels._optimizers import Lion
from diagnose.kernels._swap import swap, unswap
from torch import nn

from tests.kernels_on_cpu import CpuDevice
from tests.running import run_ranks

pytest_plugins = ("tests.kernels_on_cpu",)

Make = Callable[[Any], torch.optim.Optimizer]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_stochastic_rounding_keeps_updates_that_are_too_small_for_bf16(device: CpuDevice) -> None:
    """Each is a sixteenth of the distance to the next bf16 number: rounded to nearest, all are lost."""
    ends = []
    for allow in ((), ("stochastic-rounding",)):
        weight = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=2.0**-12)
        swap(optimizer, allow=allow)
        for _ in range(4):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends.append(weight.detach().float().mean().item())
        unswap(optimizer)
    assert ends[0] == 1.0
    assert ends[1] == pytest.approx(1 - 4 * 2.0**-12, abs=3e-4)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_replicas_that_round_by_chance_stay_equal_whatever_their_seeds_and_where_their_tensors_are(
    kind: str, device: CpuDevice
) -> None:
    ends = []
    for rank in range(2):
        torch.manual_seed(1000 + rank)
        params = [nn.Parameter(torch.linspace(0.5, 2, size).bfloat16()) for size in (700, 3000, 40)]
        make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
        optimizer = make(params, lr=1e-3, **({} if kind == "adamw" else {"momentum": 0.9}))
        swap(optimizer, allow=["stochastic-rounding"])
        for number in range(6):
            generator = torch.Generator().manual_seed(number)
            for index, p in enumerate(params):
                grad = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = None if index == 0 and number < 2 else grad  # thawed later: a step behind
            if rank and number in (1, 3, 4):
                params[1].data = params[1].data.clone()
            optimizer.step()
        ends.append([p.detach().clone() for p in params])
        unswap(optimizer)
    assert_equal(*ends)


@pytest.mark.parametrize("event", ["moved", "swapped anew", "loaded", "a group added"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
def test_no_step_throws_the_dice_of_the_one_before(kind: str, event: str, device: CpuDevice) -> None:
    """Each update is a sixteenth of a gap: it moves a sixteenth of the elements, and always other ones."""
    weight = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    make: dict[str, Make] = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=2.0**-12, weight_decay=0.0),
        "sgd": lambda params: torch.optim.SGD(params, lr=2.0**-12),
        "lion": lambda params: Lion(params, lr=2.0**-12, allow=["stochastic-rounding"]),
    }
    optimizer = make[kind]([weight])
    if kind != "lion":
        swap(optimizer, allow=["stochastic-rounding"])
    for number in range(8):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if event == "moved":
            weight.data = weight.data.clone()
        elif event == "swapped anew" and kind != "lion":
            unswap(optimizer)
            swap(optimizer, allow=["stochastic-rounding"])
        elif event == "loaded":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif number < 3:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]})
    share = (weight < 1).double().mean().item()
    expected = 1 - (15 / 16) ** 8
    assert share == pytest.approx(expected, abs=5 * (expected * (1 - expected) / 4000) ** 0.5)


def test_a_checkpoint_goes_on_with_the_dice_of_training_that_was_not_interrupted(device: CpuDevice) -> None:
    ends = []
    for interrupted in (False, True):
        weight = nn.Parameter(torch.linspace(0.5, 2, 3000).bfloat16())
        optimizer = torch.optim.AdamW([weight], lr=1e-3)
        swap(optimizer, allow=["stochastic-rounding"])
        for number in range(6):
            if interrupted and number == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                torch.manual_seed(5)
                weight = nn.Parameter(weight.detach().clone())
                optimizer = torch.optim.AdamW([weight])
                optimizer.load_state_dict(saved)
                swap(optimizer, allow=["stochastic-rounding"])
            generator = torch.Generator().manual_seed(number)
            weight.grad = torch.randn(3000, generator=generator).bfloat16()
            optimizer.step()
        ends.append([weight.detach().clone()])
    assert_equal(*ends)


def test_moments_of_one_byte_may_round_by_chance_too_and_so_do_their_copies(device: CpuDevice) -> None:
    weight = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    optimizer = AdamW8bit([weight], lr=2.0**-12, weight_decay=0.0, allow=["stochastic-rounding"])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    once = (weight < 1).double().mean().item()
    assert once == pytest.approx(1 / 16, abs=5 * (15 / 256 / 4000) ** 0.5)
    twin = copy.deepcopy(optimizer)
    [copied] = twin.param_groups[0]["params"]
    for each, p in ((optimizer, weight), (twin, copied)):
        p.grad = torch.ones_like(p)
        each.step()
    assert torch.equal(weight, copied)
    assert (weight < 1).double().mean().item() > once


def test_each_shard_throws_dice_of_its_own_and_replicas_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two replicas of two shards."""
    dist = pytest.importorskip("torch.distributed")
    for owner, name in ((sys, "excepthook"), (dist.distributed_c10d, "_backend")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # a process group leaves them changed
    tensors = pytest.importorskip("torch.distributed.tensor")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    found = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=fake.FakeStore())
        try:
            mesh = dist.init_device_mesh("cpu", (2, 2))
            made = [
                tensors.DTensor.from_local(torch.ones(3), mesh, [tensors.Replicate(), each])
                for each in (tensors.Shard(0), tensors.Replicate())
            ]
            found.append([dice_of(index, each) for each in made for index in (0, 5)])
        finally:
            dist.destroy_process_group()
    assert found[0] == found[2] == [0, 5, 0, 5]
    assert found[1] == found[3]
    first, fifth, *replicated = found[1]
    assert replicated == [0, 5]
    assert first not in range(10**6)
    assert fifth == first + 5


TWO_RANKS = """
import torch, torch.distributed as dist
from diagnose.kernels._swap import swap
from tests.kernels_on_cpu import kernels_on_cpu
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.Linear(60, 3)).bfloat16()
torch.manual_seed(100 + dist.get_rank())
wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with kernels_on_cpu() as device:
    swap(optimizer, allow=["stochastic-rounding"])
    for number in range(5):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 50).bfloat16()).float().square().mean().backward()
        if dist.get_rank() and number == 2:
            model[0].weight.data = model[0].weight.data.clone()
        optimizer.step()
assert device.launched == ["adamw"] * 5, device.launched
for p in model.parameters():
    theirs = p.detach().clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(theirs, p), "the replicas have drifted apart"
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_replicas_of_ddp_that_are_seeded_differently_round_alike() -> None:
    run_ranks("-c", TWO_RANKS)
