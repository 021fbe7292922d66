"""Where several batches cannot be one step, or no longer: what is refused, fails, or is taken back."""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnose.actions import _learning_rate
from diagnose.actions.base import CannotApply
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.actions.gradient_accumulation import GradientAccumulation
from diagnose.core.job import Job
from tests.accumulated import OPTIMIZERS, Scaling, assert_alike, by_hand, loss_of, network, on, plain, rows


def test_what_was_collected_is_stepped_on_when_it_is_taken_back():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    batches = list(DataLoader(rows(28), 4))
    with on(job, 4):
        for batch in batches:
            plain(model, optimizer, batch)
        mine = [p.grad for p in model.parameters()]
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), mine, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.05
    twin = network()
    by_hand(twin, OPTIMIZERS["sgd"](twin.parameters()), batches, [4, 7])
    assert_alike(model, twin)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_raises_leaves_the_next_one_sound(fails_at, to_none, monkeypatch):
    """The script catches it, and goes on: the batches after it train as ever."""
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    real, calls = optimizer._init_group, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("in the step")
        return real(*args)

    monkeypatch.setattr(optimizer, "_init_group", failing)
    batches, caught = list(DataLoader(rows(32), 4)), 0
    with on(job, 2):
        for batch in batches:
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, batch).backward()
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                caught += 1
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert caught == 1
    assert all(p.isfinite().all() for p in model.parameters())
    twin = network()
    # A step that had nothing to do loses nothing; one on the mean of a group loses the group.
    by_hand(
        twin,
        OPTIMIZERS["sgd"](twin.parameters()),
        batches,
        [2, 4, 6, 8],
        lost=0 if fails_at % 2 else fails_at,
    )
    assert_alike(model, twin)


def test_the_fused_optimizer_goes_with_it_in_either_order():
    ends = []
    for order in ((GradientAccumulation(), FusedOptimizer()), (FusedOptimizer(), GradientAccumulation())):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
        job = Job(models=[model], optimizers=[optimizer])
        plain(model, optimizer, next(iter(DataLoader(rows(), 4))))
        with ExitStack() as stack:
            for action in order:
                ready = stack.enter_context(action.prepare(job, 2))
                stack.enter_context(action.apply(job, ready))
            for batch in DataLoader(rows(32), 4):
                plain(model, optimizer, batch)
        assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
        ends.append(model)
    assert_alike(*ends)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_made_meanwhile_steps_on_each_batch(copied):
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    job = Job(models=[model], optimizers=[optimizer])
    batches = list(DataLoader(rows(12), 4))
    with on(job, 4):
        for batch in batches:
            plain(model, optimizer, batch)
        twin, twins = copied((model, optimizer))
        for batch in batches:
            plain(twin, twins, batch)
        assert {float(state["step"]) for state in twins.state.values()} == {3.0}


class Own(torch.optim.SGD):
    """An optimizer of the user's."""


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: torch.optim.LBFGS(p), "no rule says what learning rate LBFGS needs"),
        (lambda p: Own(p, 0.1), "no rule says what learning rate Own needs"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "AdamW is capturable"),
    ],
)
def test_an_optimizer_without_a_rule_is_refused(make, reason):
    optimizer = make(list(nn.Linear(2, 2).parameters()))
    with pytest.raises(CannotApply, match=reason):
        GradientAccumulation().check(Job(optimizers=[optimizer]))


def test_a_loop_without_an_optimizer_is_refused():
    with pytest.raises(CannotApply, match="no optimizer has stepped"):
        GradientAccumulation().check(Job())


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    def again() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(again)


@pytest.mark.parametrize(
    "kind, loop, reason",
    [
        ("sgd", closure, "computes its loss itself"),
        ("fused adam", Scaling(), "leaves it to the fused step to unscale"),
    ],
)
def test_what_turns_out_not_to_fit_is_left_alone_and_says_why(kind, loop, reason):
    model, twin = network(), network()
    optimizer, plainly = (OPTIMIZERS[kind](each.parameters()) for each in (model, twin))
    job, action = Job(models=[model], optimizers=[optimizer]), GradientAccumulation()
    with on(job, 2, action) as ready:
        assert action.why_not_stay(ready) == ""
        for batch in DataLoader(rows(), 4):
            copy.copy(loop)(model, optimizer, batch) if isinstance(loop, Scaling) else loop(
                model, optimizer, batch
            )
        assert reason in action.why_not_stay(ready)
    for batch in DataLoader(rows(), 4):
        copy.copy(loop)(twin, plainly, batch) if isinstance(loop, Scaling) else loop(twin, plainly, batch)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_where_something_of_ours_fails_each_batch_is_stepped_on_as_ever(monkeypatch):
    model, twin = network(), network()
    optimizer, plainly = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, twin))
    job, action = Job(models=[model], optimizers=[optimizer]), GradientAccumulation()
    monkeypatch.setattr(_learning_rate.Rate, "factor", None)
    with on(job, 2, action) as ready:
        batches = list(DataLoader(rows(16), 4))
        plain(model, optimizer, batches[0])
        plain(model, optimizer, batches[1])
        plain(twin, plainly, batches[1])
        assert "it failed in use: TypeError" in action.why_not_stay(ready)
        monkeypatch.undo()
        for batch in batches[2:]:
            plain(model, optimizer, batch)
            plain(twin, plainly, batch)
    assert_alike(model, twin)


def test_sparse_gradients_are_left_alone():
    table = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    job, action = Job(models=[table], optimizers=[optimizer]), GradientAccumulation()
    before = table.weight.detach().clone()
    with on(job, 2, action) as ready:
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        assert "sparse" in action.why_not_stay(ready)
    assert not torch.equal(before, table.weight)
