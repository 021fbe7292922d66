"""What CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from diagnose.core.ledger import SLOTS
from diagnose.hooks._recorder import Recorder

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_the_hook_of_the_guide_charges_what_it_says_and_leaves_no_trace() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    module: dict[str, Any] = {"__name__": "diagnose.hooks.weight_averaging"}
    exec(compile(source, str(GUIDE), "exec"), module)

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
