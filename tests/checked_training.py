"""Models in training whose numerics are checked between two steps, and changes to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._judge import Verdict
from diagnose.actions._shadow import compare_gradients
from diagnose.actions._watch import watched
from diagnose.core.job import Job
from diagnose.core.trial import Safety

EXACT, ROUNDING, PRECISION = Safety.EXACT, Safety.ROUNDING, Safety.PRECISION
BATCH = 16


class ConvNet(nn.Module):
    """A small network for images, with batch norm, and dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 10)
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.dropout(self.body(images).mean((2, 3))))

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,))


class Transformer(nn.Module):
    """A small language model with a causal mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)
        self.register_buffer("mask", torch.triu(torch.full((12, 12), float("-inf")), diagonal=1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens), mask=self.mask))

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(50, (BATCH, 13))
        return tokens[:, :-1], tokens[:, 1:]


MODELS = pytest.mark.parametrize("kind", [ConvNet, Transformer])


class Training:
    """A loop as scripts have it; the check comes between two steps."""

    def __init__(self, model: Any, *, autocast: bool = False, optimizer: Any = torch.optim.AdamW) -> None:
        self.model, self.autocast = model, autocast
        self.optimizer = optimizer(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.losses: list[float] = []
        self.job = Job(models=[model], optimizers=[self.optimizer])

    def step(self) -> None:
        inputs, target = self.model.batch()
        self.optimizer.zero_grad()
        self.job.inputs[id(self.model)] = ((inputs,), {})
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = called(self.job, self.model, inputs)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())


def called(job: Job, model: nn.Module, *args: Any) -> Any:
    """Calls a model as the hooks let the script call it: through its routes."""

    def through(index: int) -> Callable[..., Any]:
        routes = job.routes.get(id(model), [])
        if index == len(routes):
            return lambda model, *args, **kwargs: model(*args, **kwargs)
        return lambda *args, **kwargs: routes[index](through(index + 1), args, kwargs)

    return through(0)(model, *args)


def trained(kind: Any, *, steps: int = 3, dropout: float = 0.0, **options: Any) -> Training:
    """Some steps of training, all remembered."""
    torch.manual_seed(0)
    training = Training(kind(dropout), **options)
    with watched(training.job):
        for _ in range(steps):
            training.step()
    return training


def checked(training: Training, applied: Any, safety: Safety) -> Verdict:
    """One more step, and then the check."""
    with watched(training.job):
        training.step()
        return compare_gradients(training.job, applied, safety)


@contextmanager
def route(job: Job, model: nn.Module, change: Any) -> Iterator[None]:
    job.routes.setdefault(id(model), []).append(change)
    try:
        yield
    finally:
        job.routes[id(model)].remove(change)


@contextmanager
def scaled(parameter: torch.Tensor, by: float) -> Iterator[None]:
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(by)
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def autocast_at_root(training: Training) -> Any:
    def change(call: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args, **kwargs).float()

    return route(training.job, training.model, change)


@contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = [(group["fused"], group["foreach"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    yield
    for group, (was_fused, was_foreach) in zip(optimizer.param_groups, before, strict=True):
        group["fused"], group["foreach"] = was_fused, was_foreach
