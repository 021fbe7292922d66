"""What the recorder keeps of spans, threads, long and broken runs, samples and models."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnose.core.ledger import COLUMNS, GAP_AFTER, SLOT_OF, SLOTS
from diagnose.core.places import coded, decoded, place_of
from diagnose.hooks._recorder import Recorder
from tests.fakes import FakeClock, SlowData, SlowModel, SlowOptimizer, measured, one_step, steps_of

# -- spans


def test_the_innermost_span_is_charged():
    clock = FakeClock()
    recorder = Recorder()
    recorder.clock = clock
    with one_step(recorder) as step:
        clock.spend(1)
        outer = recorder.push(SLOT_OF["forward"])
        clock.spend(2)
        inner = recorder.push(SLOT_OF["compile"])
        clock.spend(4)
        recorder.leave(SLOT_OF["compile"], inner)
        clock.spend(8)
        recorder.leave(SLOT_OF["forward"], outer)
        clock.spend(16)
    assert step.times == {"gap_after_rest": 1, "forward": 10, "compile": 4, "gap_after_forward": 16}
    assert step.spans == 2


def test_each_phase_that_training_passes_through_has_a_gap_of_its_own():
    gaps = {SLOTS[slot]: SLOTS[gap] for slot, gap in enumerate(GAP_AFTER)}
    own = ("data_wait", "copy", "forward", "backward", "optimizer", "evaluation")
    assert {slot: gap for slot, gap in gaps.items() if gap != "gap_after_rest"} == {
        slot: f"gap_after_{slot}" for slot in own
    }


# -- which thread is the training thread


def trains(clock: FakeClock, steps: int) -> None:
    model = SlowModel(clock, 3, 4)
    optimizer = SlowOptimizer(clock, model, 5)
    for rows in DataLoader(SlowData(clock, num_rows=steps, fetch_ns=2)):
        model(rows).sum().backward()
        optimizer.step()


def in_a_thread(function: Any, *args: Any) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_a_loop_in_a_thread_is_measured_from_its_first_optimizer_step():
    """That it trains is known when its optimizer steps."""
    clock = FakeClock()
    with measured(clock) as recorder:
        in_a_thread(trains, clock, 6)
        recorder.finish()
    steps = steps_of(recorder)
    times = {"data_wait": 2, "forward": 3, "backward": 4, "optimizer": 5}
    assert [step.times for step in steps] == [{"optimizer": 5}, *[times] * 5]


def test_once_one_thread_trains_no_other_is_measured():
    clock = FakeClock()
    with measured(clock) as recorder:
        trains(clock, 2)
        in_a_thread(trains, clock, 50)
        recorder.finish()
    assert len(steps_of(recorder)) == 2


# -- what a long or a broken run may not do


def test_rows_are_taken_in_portions_and_each_once():
    clock = FakeClock()
    recorder = Recorder()
    recorder.clock = clock
    assert not recorder.log.has_rows()
    recorder.step_marked()
    assert not recorder.log.has_rows(), "a beginning is no step"
    for _ in range(5):
        clock.spend(1)
        recorder.step_marked()
    assert recorder.log.has_rows()
    taken = [recorder.log.take_rows(2) for _ in range(4)]
    assert [len(rows) for rows in taken] == [2, 2, 1, 0]
    first = COLUMNS.index("end_ns")
    assert [row[first] for rows in taken for row in rows] == [1_000_001 + step for step in range(5)]
    assert not recorder.log.has_rows()


def test_a_recorder_that_is_reset_knows_nothing_of_what_was():
    clock = FakeClock()
    with measured(clock) as recorder:
        trains(clock, 3)
        recorder.reset()
        trains(clock, 2)
        recorder.finish()
        steps = steps_of(recorder)
    assert len(steps) == 2
    assert recorder.steps == 2
    assert sum(sum(step.times.values()) for step in steps) == 28


def test_a_note_is_kept_once_and_there_are_never_many():
    recorder = Recorder()

    def fail(text: str) -> None:
        raise ValueError(text)

    for _ in range(3):
        recorder.guarded(fail, "the same")
    assert len(recorder.notes) == 1
    for number in range(100):
        recorder.guarded(fail, str(number))
    assert len(recorder.notes) == 20


# -- samples of the sampler belong to whole steps


def test_sampled_lines_go_to_the_flusher_with_the_step_that_they_belong_to():
    clock = FakeClock()
    recorder = Recorder()
    recorder.clock = clock
    recorder.step_marked()
    for number in range(30):
        clock.spend(10)
        recorder.log.sampled.append((clock(), 7, 1, (SLOT_OF["gap_after_rest"], number)))
        clock.spend(10)
        recorder.step_marked()
    clock.spend(10)
    recorder.log.sampled.append((clock(), 7, 1, (SLOT_OF["gap_after_rest"], 99)))
    clock.spend(10)
    recorder.finish()
    assert len(recorder.log.take_rows(100)) == 30
    seen = [(step, stack) for step, _, stack, _ in recorder.log.placed]
    assert seen == [(number, (number,)) for number in range(30)], "what comes after the last is of none"


def test_a_sample_knows_how_much_time_its_slot_had_had_in_this_step():
    clock, gap, forward = FakeClock(), SLOT_OF["gap_after_rest"], SLOT_OF["forward"]
    recorder = Recorder()
    recorder.clock = clock
    recorder.step_marked()
    for _ in range(3):  # as much time in each of three steps
        clock.spend(2_000_000)
        interrupted = recorder.push(forward)
        clock.spend(50_000_000)
        recorder.leave(forward, interrupted)
        recorder.run_into(gap)
        clock.spend(1_000_000)
        # Taken when a call that took three ticks had returned, in the second part of the gap.
        recorder.log.sampled.append((clock(), 3_000_000, 3, (gap, 1)))
        clock.spend(4_000_000)
        recorder.step_marked()
    rows = recorder.log.take_rows(10)
    assert [row[COLUMNS.index("gap_after_rest")] for row in rows] == [7_000_000] * 3
    places = [(step, decoded(code)) for step, code, _, weight in recorder.log.placed if weight == 1_000_000]
    assert places == [
        (step, (gap, place_of(since))) for step in range(3) for since in (3_000_000, 2_000_000, 1_000_000)
    ]


def test_what_was_sampled_after_an_evaluation_goes_with_the_gap_that_it_was_sampled_in():
    for evaluating, slot in ((True, "evaluation"), (False, "gap_after_rest")):
        clock, gap = FakeClock(), SLOT_OF["gap_after_evaluation"]
        recorder = Recorder()
        recorder.clock = clock
        recorder.step_marked()
        interrupted = recorder.push(SLOT_OF["evaluation"])
        clock.spend(5_000_000)
        recorder.leave(SLOT_OF["evaluation"], interrupted)
        clock.spend(1_000_000)
        recorder.log.sampled.append((clock(), 1_000_000, 1, (gap, 1)))
        clock.spend(1_000_000)
        recorder._settle_evaluation(evaluating)
        recorder.step_marked()
        recorder.log.take_rows(10)
        since_ns = 6_000_000 if evaluating else 1_000_000
        assert [code for _, code, _, _ in recorder.log.placed] == [coded(SLOT_OF[slot], place_of(since_ns))]


def test_of_a_step_that_never_ends_only_so_many_samples_are_kept(monkeypatch):
    monkeypatch.setattr("diagnose.hooks._log.MOST_SAMPLES", 10)
    clock, gap = FakeClock(), SLOT_OF["gap_after_rest"]
    recorder = Recorder()
    recorder.clock = clock
    recorder.step_marked()
    for number in range(50):
        clock.spend(1)
        recorder.log.sampled.append((clock(), 1, 1, (gap, number)))
        recorder.run_into(gap)
        assert not recorder.log.take_rows(1)
    recorder.step_marked()
    recorder.log.take_rows(1)
    assert [stack for _, _, stack, _ in recorder.log.placed] == [(number,) for number in range(40, 50)]


# -- the models that are trained


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_a_wrapped_model_may_be_switched_to_evaluation_directly(name):
    clock = FakeClock()

    class Wraps(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            setattr(self, name, inner)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return getattr(self, name)(rows)

    inner = SlowModel(clock, 3, 4)
    model = Wraps(inner)
    with measured(clock) as recorder, one_step(recorder) as step:
        model(torch.ones(1, 4))
        with evaluated(inner):
            clock.spend(50)
    assert step.times == {"forward": 3, "evaluation": 50}


def test_a_loop_that_is_forgotten_leaves_the_wrappers_the_dictionary_that_they_hold():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder()
    held = recorder.met.models
    recorder.met.model_appears(model)
    recorder.met.optimizer_steps(optimizer)
    assert held.keys() == {id(model)}
    assert (recorder.met.live_modules(), recorder.met.live_optimizers()) == ([model], [optimizer])
    recorder.reset()
    assert held == {}
    assert held is recorder.met.models
    assert (recorder.met.live_modules(), recorder.met.live_optimizers()) == ([], [])


def test_what_was_met_is_not_kept_alive():
    model = nn.Linear(4, 1)
    recorder = Recorder()
    recorder.met.model_appears(model)
    del model
    gc.collect()
    assert recorder.met.live_modules() == []
