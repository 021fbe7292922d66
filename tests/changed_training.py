"""A network in training under the real hooks, and what it computes with a change in force meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions.base import Action
from diagnose.core.job import Job
from tests.fakes import FakeClock, measured

BATCH = 12
STEPS = 6
ON = range(2, 4)
"""Steps in which an action is in force."""


class Block(nn.Module):
    """A residual block that draws random numbers in three ways, if it is to."""

    def __init__(self, width: int, *, norm: bool, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.up(self.norm(rows))))
        skipped = self.dropout.p > 0 and random.random() < 0.3
        return rows if skipped else rows + self.down(hidden)


class Net(nn.Module):
    """A stack of such blocks."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0, loss: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16, norm=norm, dropout=dropout) for _ in range(3))
        self.last = nn.Linear(16, 4)
        self.loss = loss

    def forward(self, rows: torch.Tensor, scale: float = 1.0) -> Any:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.last(hidden) * scale
        if self.loss:
            return {"logits": logits, "loss": logits.square().mean()}
        return {"logits": logits, "hidden": hidden, "size": rows.shape[0]}


def the_loss(output: Any) -> torch.Tensor:
    """Also one over the whole batch, which no piece could compute by itself."""
    logits = output["logits"]
    contrast = (logits @ logits.T).logsumexp(1).mean()
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 4) + 0.1 * contrast


Applied = Callable[[Job], AbstractContextManager[None]]


def train(
    model: Any, applied: Applied | None = None, *, accumulate: int = 1, dtype: torch.dtype = torch.float64
) -> list[Any]:
    """A run under the real hooks, with a change in force in some of its steps; returns all it computed."""
    torch.manual_seed(0)
    random.seed(0)
    model = model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with measured(FakeClock()) as recorder, ExitStack() as change:
        recorder.inputs = {}
        job = Job(
            models=[model],
            optimizers=[optimizer],
            inputs=recorder.inputs,
            routes=recorder.routes,
            unmeasured=recorder.unmeasured,
        )
        for step in range(STEPS):
            if applied is not None and step == ON.start:
                change.enter_context(applied(job))
            if step == ON.stop:
                change.close()
            for _ in range(accumulate):
                rows = torch.randn(BATCH, 8, dtype=dtype)
                loss = the_loss(model(rows)) / accumulate
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert recorder.routes == {}
        assert not recorder.notes
        recorder.finish()
        assert recorder.steps == STEPS
        assert recorder.backward_passes == STEPS * accumulate
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [losses, state, torch.rand(1).item(), random.random()]


def difference(left: list[Any], right: list[Any]) -> float:
    """How far the final weights of two runs are apart."""
    return max(float((left[1][name] - right[1][name]).abs().max()) for name in left[1])


def same(left: list[Any], right: list[Any]) -> bool:
    return str(left[0]) == str(right[0]) and difference(left, right) == 0 and left[2:] == right[2:]


def by(action: Action, value: int | None = None) -> Applied:
    """What the tuner does to put an action in force and take it out."""

    @contextmanager
    def applied(job: Job) -> Iterator[None]:
        before = action.state(job)
        with action.prepare(job, value) as prepared, action.apply(job, prepared):
            assert action.state(job) != before
            with pytest.raises(RuntimeError, match="was not undone"):
                action.verify_undone(job, before)
            yield
        action.verify_undone(job, before)

    return applied


def job_of(model: Any, **options: Any) -> Job:
    return Job(models=[model], inputs={id(model): ((torch.randn(BATCH, 8),), {})}, **options)
