"""Warnings point where they point without the hooks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.fakes import measured

pytest_plugins = ("tests.training_loops",)


def lines_warned(call: Callable[[], Any]) -> list[tuple[str, int, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(w.filename, w.lineno, str(w.message)) for w in caught]


def warns_in_a_dataset(level: int) -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            warnings.warn("mind the step", stacklevel=level)
            return 1

    next(iter(DataLoader(Rows())))


def warns_in_collate(level: int) -> None:
    def collate(rows: Any) -> int:
        warnings.warn("mind the step", stacklevel=level)
        return 1

    next(iter(DataLoader([1], collate_fn=collate)))


def warns_in_forward(level: int) -> None:
    class Model(nn.Module):
        def forward(self) -> None:
            warnings.warn("mind the step", stacklevel=level)

    Model()()


def warns_in_a_call_of_the_users(level: int) -> None:
    class Model(nn.Module):
        def __call__(self) -> None:
            warnings.warn("mind the step", stacklevel=level)

    Model()()


def warns_in_switching(level: int) -> None:
    class Model(nn.Module):
        def children(self) -> Any:
            warnings.warn("mind the step", stacklevel=level)
            return []

    Model().train()


def warns_in_a_step(level: int) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            warnings.warn("mind the step", stacklevel=level)

    Optimizer([nn.Parameter(torch.ones(1))], lr=0.1).step()


def warns_in_a_closure(level: int) -> None:
    def closure() -> float:
        warnings.warn("mind the step", stacklevel=level)
        return 0.0

    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step(closure)


def warns_in_a_schedule(level: int) -> None:
    def factor(epoch: int) -> float:
        warnings.warn("mind the step", stacklevel=level)
        return 1.0

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    torch.optim.lr_scheduler.LambdaLR(optimizer, factor).step()


def warns_in_clipping(level: int) -> None:
    def parameters() -> Iterator[Any]:
        warnings.warn("mind the step", stacklevel=level)
        yield nn.Parameter(torch.ones(1))

    torch.nn.utils.clip_grad_norm_(parameters(), 1.0)


def warns_in_saving(level: int) -> None:
    class State:
        def __reduce__(self) -> Any:
            warnings.warn("mind the step", stacklevel=level)
            return (list, ())

    torch.save(State(), io.BytesIO())


WARNINGS = [f for name, f in list(globals().items()) if name.startswith("warns_in_")]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("call", WARNINGS)
def test_a_warning_points_at_the_line_that_it_points_at_without_us(clock, call, level):
    def warn() -> None:
        call(level)

    plain = lines_warned(warn)
    assert "mind the step" in [message for _, _, message in plain]
    with measured(clock):
        assert lines_warned(warn) == plain, "the first time"
        assert lines_warned(warn) == plain


def test_torch_warns_of_a_schedule_before_the_first_step_as_it_does_without_us(clock):
    def wrong_order() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()

    plain = lines_warned(wrong_order)
    assert len(plain) == 1
    with measured(clock):
        assert lines_warned(wrong_order) == plain
