"""A model on another device than the current one: settings, readings and name are that one's."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.device_settings import DeviceSettingsHook
from diagnose.launch import flusher


class Model:
    """Has a parameter on a device; none where that is not named."""

    def __init__(self, device: str = "") -> None:
        self._device = device

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=torch.device(self._device))] if self._device else []


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"card {index}", major=9, minor=0, total_memory=80 << 30)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def facts_with(*models: Model) -> dict[str, Any]:
    recorder = Recorder()
    recorder.met.modules += [weakref.ref(model) for model in models]
    with DeviceSettingsHook().install(recorder):
        (inspect,) = recorder.looks.inspections
        inspect()
    return recorder.facts


def test_the_device_is_the_models_and_not_the_current_one(two_cards: None) -> None:
    models = Model(), Model("cpu"), Model("cuda:1")
    facts = facts_with(*models)
    assert (facts["device"]["index"], facts["device"]["name"]) == (1, "card 1")
    assert flusher._device(facts) == {"device": "cuda", "device_name": "card 1"}


def test_without_a_model_on_one_it_is_the_current_one(two_cards: None) -> None:
    models = Model(), Model("cpu")
    facts = facts_with(*models)
    assert facts["device"]["name"] == "card 0"
    assert flusher._device(facts) == {"device_name": "card 0"}


@pytest.mark.parametrize("name", ["mps", "xpu:1"])
def test_any_accelerator_that_a_model_is_on_is_named(name: str) -> None:
    model = Model(name)
    facts = facts_with(model)
    assert "device" not in facts
    assert flusher._device(facts) == {"device": name.partition(":")[0]}


def test_a_model_on_the_cpu_says_nothing_of_a_device() -> None:
    model = torch.nn.Linear(1, 1)
    assert facts_with(model) == {}  # type: ignore[arg-type]
    assert flusher._device({}) == {}
