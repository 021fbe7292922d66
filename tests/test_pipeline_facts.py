"""What the schedules of a pipeline tell of themselves, and the call that divides its batch better."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    schedules,
)

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.pipeline_facts import PipelineFactsHook
from diagnose.rules._engine import ask_one
from diagnose.rules.pipeline_bubble import PipelineBubble, staged

pytest_plugins = ("tests.group_of_one",)
pytestmark = pytest.mark.usefixtures("group_of_one")

CPU = torch.device("cpu")


def stage(index: int = 0, stages: int = 1) -> PipelineStage:
    return PipelineStage(torch.nn.Linear(4, 4), index, stages, CPU)


@pytest.mark.parametrize(
    ("kind", "given", "num_stages"),
    [
        (ScheduleGPipe, stage, 1),
        (Schedule1F1B, stage, 1),
        (ScheduleInterleaved1F1B, lambda: [stage(0, 2), stage(1, 2)], 2),
    ],
)
def test_a_schedule_that_trains_tells_its_sizes_and_the_line_that_made_it(kind, given, num_stages):
    recorder = Recorder()
    own = schedules._PipelineSchedule.__init__
    with PipelineFactsHook().install(recorder):
        schedule = kind(given(), 3, loss_fn=torch.nn.MSELoss())
        evaluating = ScheduleGPipe(stage(), 8)
        for inspect in recorder.looks.inspections:
            inspect()
    assert not evaluating._has_backward and schedule._has_backward
    facts = recorder.facts["pipeline"]
    assert facts.pop("line") > 0
    assert facts == {
        "kind": kind.__name__,
        "num_stages": num_stages,
        "num_ranks": 1,
        "num_microbatches": 3,
        "file": __file__,
    }
    assert not recorder.looks.inspections
    assert schedules._PipelineSchedule.__init__ is own


def test_without_a_schedule_nothing_is_told():
    recorder = Recorder()
    with PipelineFactsHook().install(recorder):
        for inspect in recorder.looks.inspections:
            inspect()
    assert "pipeline" not in recorder.facts


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("ScheduleGPipe(stage, 4, loss)", "ScheduleGPipe(stage, n_microbatches=16, loss_fn=loss)"),
        ("pp.ScheduleGPipe(stage, n_microbatches=4)", "pp.ScheduleGPipe(stage, n_microbatches=16)"),
        ("GPipe(stage, 4)", "ScheduleGPipe(..., n_microbatches=16)"),
        ("", "ScheduleGPipe(..., n_microbatches=16)"),
    ],
)
def test_the_scripts_own_call_is_shown_with_more_micro_batches(call: str, code: str):
    example = staged(4, 40)
    pipeline = example.program.pipeline
    assert pipeline is not None
    program = replace(example.program, pipeline=replace(pipeline, call=call))
    found = ask_one(PipelineBubble(), replace(example, program=program))
    assert found is not None and found.code == code


@pytest.mark.parametrize(
    ("samples", "into"), [(None, 16), (12, 16), (6, 24), (7, 28), (5, 20), (2, 8)], ids=str
)
def test_a_batch_is_divided_into_micro_batches_of_one_size(samples: int | None, into: int):
    found = ask_one(PipelineBubble(), staged(4, 40, micro_batch=samples))
    assert found is not None and f"into {into} micro-batches" in found.fix
