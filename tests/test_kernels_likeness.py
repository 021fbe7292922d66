"""Tensors told to be like others by one call, by torch's own and by what takes its place."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from diagnose.kernels import _likeness
from torch import nn


@pytest.fixture(params=["by torch", "by Python"])
def likeness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as it is, and as it is with a torch that lacks what it calls."""
    if request.param == "by Python":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    yield importlib.reload(_likeness)
    monkeypatch.undo()
    importlib.reload(_likeness)


def some() -> list[torch.Tensor]:
    return [torch.ones(3, 4), torch.ones(2, dtype=torch.bfloat16), torch.ones(()), torch.ones(0)]


def test_other_tensors_that_are_alike_are_told_to_be(likeness: ModuleType) -> None:
    known = likeness.Likeness(some())
    assert known.of(some())
    with torch.no_grad():
        assert known.of(some()), "as at a step"


OTHERS = {
    "None": None,
    "shape": torch.ones(4, 3),
    "as many, flat": torch.ones(12),
    "strides": torch.ones(4, 3).t(),
    "dtype": torch.ones(3, 4, dtype=torch.float16),
    "as wide": torch.ones(3, 4, dtype=torch.int32),
    "device": torch.ones(3, 4, device="meta"),
    "sparse": torch.eye(3, 4).to_sparse(),
    "differentiated": torch.ones(3, 4, requires_grad=True),
    "subclass": nn.Parameter(torch.ones(3, 4), requires_grad=False),
    "negated": torch._neg_view(torch.ones(3, 4)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_one_that_differs_is_seen(what: str, likeness: ModuleType) -> None:
    first, *rest = some()
    other = OTHERS[what]
    assert not likeness.Likeness([first, *rest]).of([other, *rest])
    assert not likeness.Likeness([*rest, first]).of([*rest, other])


def test_fewer_more_and_moved_ones_are_seen(likeness: ModuleType) -> None:
    first, *rest = some()
    known = likeness.Likeness([first, *rest])
    assert not known.of([])
    assert not known.of(rest)
    assert not known.of([first, *rest, first])
    assert not known.of([*rest, first])


def test_it_keeps_no_tensor_alive(likeness: ModuleType) -> None:
    tensors = some()
    held = [weakref.ref(tensor) for tensor in tensors]
    known = likeness.Likeness(tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert known.of(some())
