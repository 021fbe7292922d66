"""Loops that accumulate gradients: as people write them, and one written by hand to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from diagnose.actions._learning_rate import RAMP_STEPS
from diagnose.actions.gradient_accumulation import GradientAccumulation
from diagnose.core.job import Job

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-3),
    "fused adam": lambda params: torch.optim.Adam(params, 1e-2, eps=1e-3, fused=True),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))


def rows(num: int = 42) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num, 5, generator=generator), torch.randint(2, (num,), generator=generator)
    )


def loss_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


class Scaling:
    """A loop with a `GradScaler`, whose gradients overflow now and then."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.batches = 0

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.batches += 1
        loss = loss_of(model, batch) * (float("inf") if not self.batches % 5 else 1.0)
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()


@contextmanager
def on(job: Job, size: int, action: GradientAccumulation | None = None) -> Iterator[Any]:
    action = action or GradientAccumulation()
    before = action.state(job)
    with action.prepare(job, size) as ready, action.apply(job, ready):
        yield ready
    action.verify_undone(job, before)
    assert not job.on_iterator


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    ends: Sequence[int],
    clip: float = math.inf,
    lost: int = 0,
) -> None:
    """Trains on means of gradients of batches; a group ends after each batch whose number is in `ends`, and
    the step at batch number `lost` fails."""
    linear, group, taken = isinstance(optimizer, torch.optim.SGD), [], 0
    for number, batch in enumerate(batches, 1):
        model.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        group.append([p.grad.clone() for p in model.parameters()])
        if number in ends:
            for p, *gradients in zip(model.parameters(), *group, strict=True):
                p.grad = sum(gradients) / len(gradients)
            taken += 1
            full = len(group) if linear else math.sqrt(len(group))
            factor = 1 + (full - 1) * min(1.0, taken / RAMP_STEPS)
            rates = [each["lr"] for each in optimizer.param_groups]
            for each, rate in zip(optimizer.param_groups, rates, strict=True):
                each["lr"] = rate * factor
            if number != lost:
                optimizer.step()
            for each, rate in zip(optimizer.param_groups, rates, strict=True):
                each["lr"] = rate
            group = []


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(list(one.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-7)
