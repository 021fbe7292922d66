"""Runs training loops with the hooks in place and an action switched on and off at the ends of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diagnose.actions.base import Action
from diagnose.core.job import Job
from diagnose.hooks._recorder import Recorder
from tests.fakes import measured

WARMUP = 3
"""Steps before an action is looked at: the loop's objects have appeared, optimizers have their state."""


class Live:
    """A job that the hooks have found, and one action on it.

    Attributes:
        job: What the action works on.
        prepared: What its `prepare` gave.
        steps: Steps that have ended.
        on_steps: Steps that ran, or run, with the action in force.
        at: Functions to call at the end of a step, by its number.
        gave_up: Why the action said that it must not stay in force, if it did; it does not come back.
    """

    def __init__(self, recorder: Recorder, action: Action, value: int | None, on: Callable[[int], bool]):
        self.job = Job(routes=recorder.routes, on_iterator=recorder.looks.on_iterator)
        self.prepared: Any = None
        self.steps = 0
        self.on_steps: list[int] = []
        self.at: dict[int, Callable[[], object]] = {}
        self.gave_up = ""
        self._recorder = recorder
        self._action = action
        self._value = value
        self._on = on
        self._preparation = ExitStack()
        self._application = ExitStack()
        recorder.inputs = self.job.inputs = {}
        recorder.on_boundary = self._boundary
        recorder.looks.on_iterator.append(self._begins)

    def _begins(self, loader: Any, iterator: Any) -> None:
        self.job.loaders.append(loader)
        self.job.iterators.append(iterator)

    def _boundary(self) -> None:
        job, action = self.job, self._action
        job.models = self._recorder.met.live_modules()
        job.optimizers = self._recorder.met.live_optimizers()
        for called in list(job.on_step):
            called()
        self.steps += 1
        if self.steps == WARMUP:
            action.check(job)
            self.before = action.state(job)
            self.prepared = self._preparation.enter_context(action.prepare(job, self._value))
        if self.steps >= WARMUP:
            self._application.close()
            action.verify_undone(job, self.before)
            self.gave_up = action.why_not_stay(self.prepared)
            if self._on(self.steps) and not self.gave_up:
                self._application.enter_context(action.apply(job, self.prepared))
                self.on_steps.append(self.steps)
        self.at.get(self.steps, lambda: None)()

    def close(self) -> None:
        """The loop has ended: everything is undone."""
        self._application.close()
        self._preparation.close()
        if self.steps >= WARMUP:
            self._action.verify_undone(self.job, self.before)
        assert not self.job.routes and not self.job.on_step


def abba(step: int) -> bool:
    """On for two steps, off for two, and so on."""
    return step % 4 in (0, 1)


def always(step: int) -> bool:
    """On from the first moment to the end."""
    return True


@contextmanager
def tuned(
    action: Action | None,
    *,
    value: int | None = None,
    on: Callable[[int], bool] = abba,
    may_give_up: bool = False,
) -> Iterator[Live | None]:
    """Installs the hooks, and, unless there is no action, switches it on and off at the ends of steps."""
    if action is None:
        yield None
        return
    notes: list[str]
    with measured(perf_counter_ns) as recorder:
        live = Live(recorder, action, value, on)
        try:
            yield live
        finally:
            live.close()
        notes = list(recorder.notes)
    assert not notes, notes
    assert live.on_steps, "it was never in force"
    assert may_give_up or not live.gave_up, live.gave_up


class ConvNet(nn.Module):
    """Convolutions, normalization, dropout and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before a normalization: its gradient is nothing but rounding.
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, padding=1),
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4 * 8 * 8, 2)

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(image_NCHW).flatten(1)))


def images(num: int = 48) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.randn(num, 3, 8, 8, generator=generator), torch.randint(2, (num,), generator=generator)
    )
    return DataLoader(data, batch_size=4, shuffle=True)


def train(
    model: nn.Module,
    optimizer: Any,
    loader: DataLoader[Any],
    *,
    each: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """The loop of a script: returns its losses."""
    losses = []
    for step, (image, label) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        each(step)
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in [*model.parameters(), *model.buffers()]]


def assert_equal(ours: Sequence[torch.Tensor], alone: Sequence[torch.Tensor]) -> None:
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))


def assert_close(
    ours: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    torch.testing.assert_close(list(ours), list(alone), rtol=rtol, atol=atol)
