"""The watch over every test would notice what it is there for."""

from __future__ import annotations

import gc
import signal
from types import FunctionType

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.conftest import changes, global_state, torch_attributes, traces


def pass_on(*args: object) -> None:
    return None


def test_a_replaced_function_and_method_of_torch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_attributes()
    monkeypatch.setattr(torch, "save", pass_on)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", pass_on)
    assert traces(before, torch_attributes()) == [
        "torch.save",
        "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
    ]
    monkeypatch.undo()
    assert traces(before, torch_attributes()) == []


def test_a_method_of_ours_added_to_a_class_of_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_attributes()
    ours = FunctionType(pass_on.__code__, {"__name__": "diagnose.hooks.model"})
    monkeypatch.setattr(DistributedDataParallel, "__call__", ours)
    assert traces(before, torch_attributes()) == [
        "torch.nn.parallel.distributed.DistributedDataParallel.__call__"
    ]


def test_a_call_of_ours_left_on_the_class_of_a_model_is_noticed() -> None:
    class Model(torch.nn.Linear):
        pass

    before = torch_attributes()
    Model.__call__ = FunctionType(pass_on.__code__, {"__name__": "diagnose.hooks.base"})
    (left,) = traces(before, torch_attributes())
    assert left == f"{__name__}.{Model.__qualname__}.__call__"
    del Model.__call__


def test_what_torch_replaces_by_itself_is_not_held_against_a_test() -> None:
    before = torch_attributes()
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    model(torch.ones(1, 2))
    torch._dynamo.reset()
    assert traces(before, torch_attributes()) == []


def test_hooks_handlers_and_settings_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = global_state()
    monkeypatch.setenv("DIAGNOSE_DIR", "elsewhere")
    gc.callbacks.append(pass_on)
    hook = register_optimizer_step_pre_hook(pass_on)
    handler = signal.signal(signal.SIGURG, pass_on)
    with torch.no_grad():
        changed = changes(before, global_state())
    signal.signal(signal.SIGURG, handler)
    hook.remove()
    gc.callbacks.remove(pass_on)
    assert changed == [
        "environment",
        "gc.callbacks",
        f"handler of signal {int(signal.SIGURG)}",
        "torch.is_grad_enabled",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
    ]
