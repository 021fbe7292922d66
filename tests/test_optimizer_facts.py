"""What is learnt of a live optimizer: what it runs as, its state, its line and whether it can be fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diagnose.analysis.program import program_of
from diagnose.core.ledger import COLUMNS
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.model_facts import describe as describe_model
from diagnose.hooks.optimizer import OptimizerHook
from diagnose.hooks.optimizer_facts import OptimizerFactsHook, describe
from diagnose.rules._engine import ask_one
from diagnose.rules._examples import card, profile
from diagnose.rules.optimizer_offload import OptimizerOffload
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog


@pytest.mark.parametrize(
    ("options", "implementation"),
    [({}, "for-loop"), ({"foreach": True}, "foreach"), ({"fused": True}, "fused")],
)
def test_an_optimizer_tells_what_it_runs_as(options: dict[str, bool], implementation: str):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    facts = describe(optimizer)
    assert facts["implementation"] == implementation
    assert (facts["num_tensors"], facts["num_elements"], facts["param_bytes"]) == (2, 16, 64)
    assert facts["state_bytes"] >= 2 * 64
    assert facts["can_fuse"]


def test_groups_that_train_something_are_counted():
    trained = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    groups = [{"params": trained[:2]}, {"params": [frozen]}, {"params": trained[2:]}]
    assert describe(torch.optim.SGD(groups, lr=0.1))["num_groups"] == 2


class Offloaded(torch.optim.Optimizer):
    """An optimizer whose moments stay in host memory, wherever the parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["moment"] = torch.zeros(param.shape)


@pytest.mark.parametrize(
    ("device", "updates_copies", "host_bytes"),
    [("meta", False, 64), ("meta", True, 64), ("cpu", False, 0), ("cpu", True, 0)],
)
def test_state_in_host_memory_is_told_where_the_model_is_on_a_device(device, updates_copies, host_bytes):
    """Of tensors of `meta`, in place of a device."""
    model = nn.Linear(3, 4, device=device)
    copies = [nn.Parameter(torch.zeros(param.shape)) for param in model.parameters()]
    optimizer = Offloaded(copies if updates_copies else model.parameters())
    optimizer.step()
    facts = describe(optimizer, [model])
    assert (facts["state_bytes"], facts["host_state_bytes"]) == (64, host_bytes)


def test_state_beside_its_parameters_and_step_counters_are_not_offloaded():
    model = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.Embedding(100, 4))  # whose table stays here
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    facts = describe(optimizer, [model])
    assert facts["state_bytes"] > 2 * 4 * (16 + 400)
    assert facts["host_state_bytes"] == 2 * 4, "the counters of two tensors on the device"


def test_an_offloaded_optimizer_is_named_from_what_is_told_of_it():
    model = nn.Linear(3, 4, device="meta")
    for kind, named in ((Offloaded, True), (torch.optim.Adagrad, False)):
        optimizer = kind(model.parameters())
        optimizer.step()
        facts = {
            "models": [describe_model(model)],
            "optimizers": [{**describe(optimizer, [model]), "file": "", "line": 0}],
        }
        steps = np.zeros((5, len(COLUMNS)), dtype=np.int64)
        log = RankLog(path=Path("rank0.sqlite"), meta={"facts": facts}, steps=steps)
        run_profile = profile(optimizer_ms=40, device=card(), program=program_of(log, 0, Sources()))
        assert (ask_one(OptimizerOffload(), run_profile) is not None) == named


@pytest.mark.parametrize("unfit", ["16-bit", "sparse", "derived", "differentiable"])
def test_an_optimizer_that_torch_cannot_fuse_is_not_said_to_be_one(unfit: str):
    class Derived(torch.optim.AdamW):
        pass

    layer = nn.Embedding(64, 4, sparse=unfit == "sparse")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    if unfit == "16-bit":
        layer.to(torch.bfloat16)
    elif unfit == "derived":
        optimizer = Derived(layer.parameters())
    elif unfit == "differentiable":
        optimizer = torch.optim.AdamW(layer.parameters(), differentiable=True)
    facts = describe(optimizer, [layer])
    assert not facts["can_fuse"]
    assert facts["can_group"] == (unfit == "16-bit")


def test_an_optimizer_is_known_with_the_line_that_made_it():
    recorder = Recorder()
    with OptimizerFactsHook().install(recorder), OptimizerHook().install(recorder):
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for inspect in recorder.looks.inspections:
            inspect()
    (facts,) = recorder.facts["optimizers"]
    assert facts["file"] == __file__
    assert facts["line"] > 0
    assert facts["kind"] == "SGD"
    assert not recorder.looks.inspections


@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_that_gets_its_momentum_after_others_is_told(late: bool):
    recorder = Recorder()
    with OptimizerFactsHook().install(recorder), OptimizerHook().install(recorder):
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            model.bias.requires_grad_(number > 0 or not late)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert recorder.facts.get("late_momenta", False) is late
    assert not recorder.looks.on_step
