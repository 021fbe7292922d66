"""A module called beside the model: prepares it the batch, is it a part of the model, or an evaluation?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.fakes import FakeClock, SlowModel, measured, one_step

pytest_plugins = ("tests.group_of_one", "tests.training_loops")
pytestmark = pytest.mark.usefixtures("group_of_one")


class Prepares(torch.nn.Module):
    """Makes another batch of a batch."""

    def __init__(self, clock: FakeClock, scale: Any = 2.0) -> None:
        super().__init__()
        self.clock, self.scale = clock, scale

    def forward(self, rows: Any) -> Any:
        self.clock.spend(4)
        return rows * self.scale


def test_a_module_that_prepares_the_batch_is_the_loops_own_code_from_its_second_call_on(clock):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        prepare, model = torch.nn.Sequential(Prepares(clock)), SlowModel(clock, forward_ns=6)
        for _ in range(3):
            model(prepare(torch.ones(2, 4)))
    assert not recorder.notes
    assert step.times == {"forward": 4 + 3 * 6, "gap_after_forward": 2 * 4}
    assert [calls for (kind, *_), calls in recorder.met.sites.items() if kind == "forward"] == [3]
    assert recorder.met.live_modules() == [model]


def test_modules_of_new_classes_are_found_after_one_that_prepares_the_batch(clock):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        prepare = Prepares(clock)
        prepare(torch.ones(2, 4))
        assert recorder.listening
        SlowModel(clock, forward_ns=6)(prepare(torch.ones(2, 4)))
    assert step.times == {"forward": 4 + 6, "gap_after_forward": 4}


FROZEN = torch.nn.Parameter(torch.ones(4), requires_grad=False)


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(torch.ones(4, requires_grad=True), id="weights that are no parameters"),
        pytest.param(FROZEN, id="a teacher"),
        pytest.param(torch.ones(4, device="meta"), id="on a device"),
    ],
)
def test_a_module_that_may_be_a_part_of_the_model_is_charged_each_time(clock, scale):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        module, rows = Prepares(clock, scale), torch.ones(2, 4, device=scale.device)
        for _ in range(3):
            module(rows)
    assert step.times == {"forward": 3 * 4}


def test_a_module_to_which_gradients_lead_is_a_part_of_the_model_though_its_first_call_had_none(clock):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        simulated, rows = Prepares(clock), torch.ones(2, 4)
        for given in (rows, rows, rows.clone().requires_grad_(), rows):
            simulated(given)
            clock.spend(1)
    assert step.times == {"forward": 3 * 4, "gap_after_forward": 4 + 4}


def test_a_module_that_prepares_the_batch_without_gradients_is_the_loops_own_code(clock):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        prepare, model = torch.nn.Sequential(Prepares(clock)), SlowModel(clock, forward_ns=6)
        for _ in range(2):
            with torch.no_grad():
                batch = prepare(torch.ones(2, 4))
            model(batch)
    assert not recorder.notes
    assert step.times == {"gap_after_rest": 4, "forward": 2 * 6, "gap_after_forward": 4}
    assert recorder.met.live_modules() == [model]


def test_a_module_without_parameters_that_is_called_beside_an_evaluated_model_evaluates(clock):
    with measured(clock, "forward", "evaluation") as recorder, one_step(recorder) as step:
        score, model = Prepares(clock), SlowModel(clock, forward_ns=6)
        model(torch.ones(2, 4))
        with torch.no_grad():
            score(model(torch.ones(2, 4)))
        clock.spend(1)
        model.eval()
        with torch.no_grad():
            model(score(torch.ones(2, 4)))
        model.train()
    assert step.times == {"forward": 6, "evaluation": 6 + 4 + 1 + 4 + 6}


@pytest.mark.parametrize(
    ("scale", "device"),
    [
        pytest.param(FROZEN, "cpu", id="a teacher"),
        pytest.param(2.0, "meta", id="on a device"),
    ],
)
def test_what_may_be_a_model_or_runs_beside_the_loop_is_an_evaluation_without_gradients(
    clock, scale, device
):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        module = Prepares(clock, scale)
        module.register_parameter("scale_", scale if isinstance(scale, torch.nn.Parameter) else None)
        with torch.no_grad():
            module(torch.ones(2, 4, device=device))
    assert step.times == {"evaluation": 4}


class Holds(torch.nn.Module):
    """Calls a model that is none of its parts."""

    def __init__(self, *held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, rows: Any, *given: Any) -> Any:
        return (*self.held, *given)[0](rows)


@pytest.mark.parametrize("kept", [True, False], ids=["keeps it", "is given it"])
def test_a_module_that_calls_a_model_which_is_no_part_of_it_evaluates_without_gradients(clock, kept):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        teacher = SlowModel(clock, forward_ns=6)
        module, given = (Holds(teacher), ()) if kept else (Holds(), (teacher,))
        with torch.no_grad():
            module(torch.ones(2, 4), *given)
    assert step.times == {"evaluation": 6}


def test_a_compiled_model_without_parameters_evaluates_as_a_part_of_another(clock):
    rows = torch.ones(2, 4)
    frozen = torch.jit.freeze(torch.jit.trace(torch.nn.Linear(4, 4).eval(), rows))
    assert not list(frozen.parameters())
    with measured(clock, "forward") as recorder, one_step(recorder) as step, torch.no_grad():
        torch.nn.Sequential(Prepares(clock), frozen)(rows)
    assert step.times == {"evaluation": 4}


def test_a_checkpointed_module_without_parameters_is_a_part_of_the_model(clock):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        rows = torch.ones(2, 4, requires_grad=True) * 2
        checkpoint(Prepares(clock), rows, use_reentrant=True)
    assert step.times == {"forward": 4}


def test_a_module_with_something_else_for_parameters_is_called_as_ever_without_gradients(clock):
    with measured(clock, "forward") as recorder, one_step(recorder) as step:
        prepare = Prepares(clock)
        prepare.parameters = {"scale": 2.0}
        with torch.no_grad():
            assert torch.equal(prepare(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    assert step.times == {"evaluation": 4}
    assert len(recorder.notes) == 1
