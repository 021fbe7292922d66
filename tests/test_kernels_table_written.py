"""When the table is written: not while all stays, in captured steps not again, and anew for new tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from diagnose.kernels._structs import PATCH_VALUES, TOLD_MANY_WORDS, Group, Row
from diagnose.kernels._swap import swap
from diagnose.kernels._table import Table
from torch import nn

from tests.kernels_on_cpu import CPU, CpuDevice, kernels_on_cpu
from tests.test_kernels_table import adamw, assert_same_as_torch, like, several, sgd


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """As of a driver before CUDA 12.1, unless a test asks for one that takes large arguments."""
    with kernels_on_cpu(seed=3, large_arguments=getattr(request, "param", False)) as device:
        yield device


def many() -> list[torch.Tensor]:
    """More than 4 KB of arguments hold the addresses of."""
    return [*several(), *(nn.Parameter(torch.randn(1 + index % 5)) for index in range(600))]


def test_nothing_is_written_into_the_table_while_pointers_and_numbers_stay(device: CpuDevice) -> None:
    torch.manual_seed(0)
    params = several()
    optimizer = adamw(params)
    swap(optimizer)
    for p, grad in zip(params, like(0, params), strict=True):
        p.grad = grad
    for _ in range(3):
        optimizer.step()
        for p in params:
            assert p.grad is not None
            p.grad.mul_(0.5)
    assert device.launched == ["adamw", "adamw", "adamw"]
    assert device.told == [len(params), 0, 0], "each address"
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert device.told[3:] == [8]


@pytest.mark.parametrize(
    "make_params, device", [(several, False), (many, False), (many, True)], indirect=["device"]
)
def test_a_captured_step_replays_with_its_own_gradients_and_numbers(
    make_params: Callable[[], list[torch.Tensor]], device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is its launches with the arguments they had; between replays steps are made without it."""
    params = make_params()
    grads = {when: like(number, params) for number, when in enumerate(("eager", "captured"))}
    optimizer = sgd(params)
    swap(optimizer)

    def step(when: str, lr: float) -> None:
        for p, grad in zip(params, grads[when], strict=True):
            p.grad = grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    step("captured", 0.5)
    launch, graph = device.launch, []
    with monkeypatch.context() as capturing:
        capturing.setattr(Table, "is_captured", lambda self: True)
        capturing.setattr(
            device, "launch", lambda *names, args, **how: graph.append((names, copies(args), how))
        )
        step("captured", 0.5)
    optimizer.zero_grad()
    ends = []
    for replayed in (False, True):
        step("eager", 0.25)
        for p in params:
            p.detach().zero_()
            optimizer.state[p]["momentum_buffer"].zero_()
        if replayed:
            for names, args, how in graph:
                launch(*names, args=args, **how)
        else:
            step("captured", 0.5)
        ends.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_captured_step_that_needs_what_was_not_compiled_before_is_left_to_torch(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load code while a graph is captured may break the script's capture."""
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        params = several()
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        taken = swap(optimizer) if on else None
        for number, scale in enumerate((None, 4.0, 4.0)):
            for p, grad in zip(params, like(number, params), strict=True):
                p.grad = grad
            if scale is not None:
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(0.0)
            device.launched.clear()
            with monkeypatch.context() as capturing:
                capturing.setattr(Table, "is_captured", lambda self, now=number == 1: now)
                optimizer.step()
            if taken is not None:
                assert [reason for reason in taken.stepper.left if "graph" not in reason] == []
                assert bool(taken.stepper.left) == (not device.launched) == (number == 1)
        ends.append([*params, *(value for p in params for value in optimizer.state[p].values())])
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)


def copies(args: Sequence[ctypes.Structure]) -> list[ctypes.Structure]:
    """Arguments as the driver keeps them: a copy."""
    return [type(arg).from_buffer_copy(arg) for arg in args]


@pytest.mark.parametrize(
    "num_rows, device", [(2 * PATCH_VALUES, False), (TOLD_MANY_WORDS + 100, True)], indirect=["device"]
)
def test_gradients_given_by_the_table_are_the_last_ones_and_only_those(
    num_rows: int, device: CpuDevice
) -> None:
    """Writes to random subsets of a column longer than a launch carries, against what a list would hold. A
    scale by 1 touches no gradient."""
    rows = [Row(g=index + 1, count=1) for index in range(num_rows)]
    table = Table(CPU, rows, [Group()])
    expected = [row.g for row in rows]
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        for index in torch.randint(len(rows), (20,), generator=generator).tolist():
            expected[index] += 1000
        table.point_to(list(expected))
        table.set_groups([Group(lr=float(number))])
        table.run("scale", "scale")
        held = table._memory["rows"].view(torch.int64).view(-1, 12)[:, 1]
        assert held.tolist() == expected
        assert table._memory["groups"].view(torch.float64)[0] == number
    assert "patch" in device.launched


@pytest.mark.parametrize(
    "num_groups, num_patches, device", [(80, 2, False), (80, 0, True), (520, 2, True)], indirect=["device"]
)
def test_more_groups_than_a_launch_carries_are_written_before_it(
    num_groups: int, num_patches: int, device: CpuDevice
) -> None:
    table = Table(CPU, [Row(g=8, count=1)], [Group() for _ in range(num_groups)])
    table.set_groups([Group(lr=float(number)) for number in range(num_groups)])
    table.run("scale", "scale")
    held = table._memory["groups"].view(torch.float64).view(-1, 8)[:, 0]
    assert held.tolist() == list(range(num_groups))
    assert device.launched == ["patch"] * num_patches + ["scale"]


@pytest.mark.parametrize("what", ["parameter", "state tensor", "data of the state"])
def test_a_tensor_that_was_replaced_is_looked_up_again(what: str, device: CpuDevice) -> None:
    """An offloader, or EMA, puts another tensor in the place of the old one, which stays as it is."""
    old: list[torch.Tensor] = []

    def each(number: int, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        if number != 1:
            return
        p = params[4]
        state = optimizer.state[p]
        if what == "parameter":
            old.append(p.data)
            p.data = p.data.clone() * 2
        elif what == "state tensor":
            old.append(state["exp_avg"])
            state["exp_avg"] = state["exp_avg"].clone() * 2
        else:
            old.append(state["exp_avg_sq"].data)
            state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone() * 2
        old.append(old[-1].clone())

    assert_same_as_torch(several, each=each)
    assert torch.equal(old[-2], old[-1]), "what was replaced is written no more"
