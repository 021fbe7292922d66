"""The optimizer in the backward pass: the same updates, and where they are not let."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions.base import CannotApply
from diagnose.actions.optimizer_in_backward import OptimizerInBackward
from diagnose.core.job import Job
from tests.changed_training import BATCH, Net, the_loss


class Loop:
    """A loop without hooks, whose step can be changed."""

    def __init__(
        self, kind: Any = torch.optim.AdamW, between: Any = None, passes: int = 1, scaler: Any = None
    ) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.between, self.passes = between, passes
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.job = Job(models=[self.model], optimizers=[self.optimizer])

    def steps(self, number: int) -> None:
        for _ in range(number):
            for _ in range(self.passes):
                self.scaler.scale(the_loss(self.model(torch.randn(BATCH, 8)))).backward()
            if self.between is not None:
                self.between(self)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def outcome(self) -> str:
        return str([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()])


OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_in_the_backward_pass_are_exact(kind: Any) -> None:
    loop = Loop(kind)
    action = OptimizerInBackward()
    before = action.state(loop.job)
    loop.steps(2)
    with action.apply(loop.job, None):
        loop.steps(2)
        the_loss(loop.model(torch.randn(BATCH, 8))).backward()
        assert all(p.grad is None for p in loop.model.parameters()), "each was used and freed"
        loop.optimizer.step()
        loop.scheduler.step()
        loop.steps(1)
    action.verify_undone(loop.job, before)
    loop.steps(2)
    alone = Loop(kind)
    alone.steps(8)
    assert loop.outcome() == alone.outcome()


def clip(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def clamp(loop: Loop) -> None:
    """As scripts do it that are older than `torch.no_grad`."""
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-1e-3, 1e-3)


def warm_up(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize(
    ("between", "passes", "reason"),
    [
        (clip, 1, "as by clipping"),
        (clamp, 1, "as by clipping"),
        (None, 2, "several backward passes"),
        (warm_up, 1, "settings are changed"),
    ],
)
def test_gradients_that_are_not_ready_keep_the_step_where_it_is(
    between: Any, passes: int, reason: str
) -> None:
    loop = Loop(between=between, passes=passes)
    action = OptimizerInBackward()
    with action.apply(loop.job, None):
        loop.steps(6)
    alone = Loop(between=between, passes=passes)
    alone.steps(6)
    assert loop.outcome() == alone.outcome()
    with pytest.raises(CannotApply, match=reason), action.apply(loop.job, None):
        pass


@pytest.mark.parametrize(("fused", "reason"), [(False, "as by clipping"), (True, "GradScaler")])
def test_scaled_gradients_keep_the_step_where_it_is(fused: bool, reason: str) -> None:
    def loop() -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return Loop(partial(torch.optim.AdamW, fused=fused), scaler=scaler)

    scaled, action = loop(), OptimizerInBackward()
    with action.apply(scaled.job, None):
        scaled.steps(6)
    alone = loop()
    alone.steps(6)
    assert scaled.outcome() == alone.outcome()
    with pytest.raises(CannotApply, match=reason), action.apply(scaled.job, None):
        pass


def test_another_optimizer_that_steps_instead_finds_the_gradients_from_its_second_step_on() -> None:
    loop, action = Loop(), OptimizerInBackward()
    with action.apply(loop.job, None):
        loop.steps(4)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), 1e-2)
        loop.steps(1)
        the_loss(loop.model(torch.randn(BATCH, 8))).backward()
        assert all(p.grad is not None for p in loop.model.parameters())
    with pytest.raises(CannotApply, match="another optimizer"), action.apply(loop.job, None):
        pass
