"""What CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from diagnose.core.job import Job
from diagnose.core.ledger import SLOTS
from diagnose.hooks._recorder import Recorder
from diagnose.rules import check_rule

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def shown(name: str, module_name: str) -> dict[str, Any]:
    """Runs the piece of the guide that defines a name, as the file that the guide calls it."""
    pieces = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (source,) = (piece for piece in pieces if f"class {name}(" in piece)
    module = ModuleType(module_name)
    sys.modules[module_name] = module  # a rule finds its title in its module
    try:
        exec(compile(source, str(GUIDE), "exec"), vars(module))
    finally:
        del sys.modules[module_name]
    return vars(module)


def test_the_hook_of_the_guide_charges_what_it_says_and_leaves_no_trace() -> None:
    module = shown("WeightAveragingHook", "diagnose.hooks.weight_averaging")

    model, recorder, running = torch.nn.Linear(2, 2), Recorder(), []

    def average(averaged: torch.Tensor, parameter: torch.Tensor, count: int) -> torch.Tensor:
        running.append(SLOTS[recorder.current])
        return averaged

    averaged = AveragedModel(model, avg_fn=average)
    averaged.update_parameters(model)  # the first call copies and does not average
    original = AveragedModel.update_parameters
    with module["WeightAveragingHook"]().install(recorder):
        averaged.update_parameters(model)
    assert running == ["optimizer", "optimizer"], "weight and bias"
    assert AveragedModel.update_parameters is original


def test_the_rule_of_the_guide_is_held_to_what_every_rule_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = shown("FileReopened", "diagnose.rules.file_reopened")
    as_module = ModuleType("diagnose.rules.file_reopened", module["__doc__"])
    monkeypatch.setitem(sys.modules, "diagnose.rules.file_reopened", as_module)
    rule = module["FileReopened"]()
    assert rule.name == "file-reopened"
    check_rule(rule)


def test_the_action_of_the_guide_changes_the_job_and_undoes_it() -> None:
    module = shown("FlushDenormal", "diagnose.actions.flush_denormal")
    action, job = module["FlushDenormal"](), Job()
    before = action.state(job)
    assert before is False
    with action.prepare(job, None) as prepared:
        for _ in range(2):
            with action.apply(job, prepared):
                assert action.state(job) is True
            action.verify_undone(job, before)
