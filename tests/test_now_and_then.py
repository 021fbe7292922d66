"""What is on in some steps only: when it was, and how much longer these steps are."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from diagnose.analysis.now_and_then import now_and_then
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.series import MOST_TIMES
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.compile import CompileHook
from diagnose.hooks.now_and_then import NowAndThenHook

MS = 1_000_000
Rows = npt.NDArray[np.int64]


def told(recorder: Recorder) -> dict[str, list[tuple[int, int]]]:
    for tell in recorder.looks.flushed:
        tell()
    return recorder.facts.get("now_and_then", {})


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_each_time_of_either_is_noted_with_its_beginning_and_its_end():
    recorder = Recorder()
    enabled, begun_ns = torch.set_anomaly_enabled, time.perf_counter_ns()
    with NowAndThenHook().install(recorder):
        assert told(recorder) == {}
        for _ in range(3):
            with torch.autograd.detect_anomaly():
                assert torch.is_anomaly_enabled()
            assert not torch.is_anomaly_enabled()
        with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)) as seen:
            for _ in range(9):
                nn.Linear(2, 2)(torch.ones(1, 2))
                seen.step()
        found = told(recorder)
    assert {name: len(times) for name, times in found.items()} == {"anomaly": 3, "profiler": 3}
    for times in found.values():
        flat = [begun_ns, *(at for each in times for at in each), time.perf_counter_ns()]
        assert all(before < after for before, after in pairwise(flat))
    assert torch.set_anomaly_enabled is enabled
    assert not recorder.notes


def test_what_the_compiler_searches_for_is_none_of_the_scripts():
    recorder = Recorder()
    recorder.step_marked()
    layer = nn.Linear(4, 1)
    with CompileHook().install(recorder), NowAndThenHook().install(recorder):
        compiled = torch.compile(layer, backend="aot_eager", dynamic=False)
        for num_rows in (2, 3):
            compiled(torch.ones(num_rows, 4)).sum().backward()
        found = told(recorder)
    assert sum(event[2] == "compile" for event in recorder.events) >= 2
    assert found == {} and not recorder.notes


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_function_form_and_one_inside_of_another_are_noted_as_one_time():
    recorder = Recorder()
    with NowAndThenHook().install(recorder):
        torch.autograd.set_detect_anomaly(mode=True)
        with torch.autograd.detect_anomaly():
            pass
        assert torch.is_anomaly_enabled() and told(recorder) == {}
        torch.autograd.set_detect_anomaly(False)
        torch.autograd.set_detect_anomaly(False)
        assert len(told(recorder)["anomaly"]) == 1
    assert not torch.is_anomaly_enabled() and not recorder.notes


def profile_nothing() -> None:
    with torch.profiler.profile():
        pass


def test_what_another_thread_switches_is_none_of_the_loops():
    recorder = Recorder()
    recorder.step_marked()
    with NowAndThenHook().install(recorder):
        other = threading.Thread(target=profile_nothing)
        other.start()
        other.join()
        assert told(recorder) == {}


def test_it_is_noted_so_often_at_most():
    recorder = Recorder()
    with NowAndThenHook().install(recorder):
        for _ in range(MOST_TIMES + 50):
            torch.autograd.set_detect_anomaly(True)
            torch.autograd.set_detect_anomaly(False)
        assert len(told(recorder)["anomaly"]) == MOST_TIMES


def steps(forward_ms: npt.NDArray[np.float64]) -> tuple[Rows, dict[Phase, npt.NDArray[np.float64]]]:
    """The rows of steps that are a forward pass each, and its times."""
    times = forward_ms * MS
    rows = np.zeros((len(times), len(COLUMNS)), dtype=np.int64)
    rows[:, len(COUNTS)] = times
    rows[:, COUNTS.index("end_ns")] = np.cumsum(rows[:, len(COUNTS)])
    return rows, {Phase.FORWARD: times, Phase.OTHER: np.zeros(len(times))}


def during(rows: Rows, indices: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """A millisecond in the middle of each of these steps."""
    ends = rows[indices, 0] - rows[indices, len(COUNTS)] // 2
    return [(int(end), int(end) + MS) for end in ends]


def noisy(count: int) -> npt.NDArray[np.float64]:
    return 10 * (1 + 0.05 * np.random.default_rng(0).standard_normal(count))


def test_steps_with_it_are_compared_with_the_others():
    forward, where = noisy(400), np.arange(5, 400, 10)
    forward[where] += 6.0
    rows, phases = steps(forward)
    found = now_and_then({"now_and_then": {"anomaly": during(rows, where)}}, rows, phases)["anomaly"]
    assert (found.times, found.share) == (40, 0.1)
    assert found.more_ns == {Phase.FORWARD: pytest.approx(0.6 * MS, rel=0.05)}


def test_steps_that_are_no_longer_with_it_take_nothing_more():
    rows, phases = steps(noisy(400))
    times = during(rows, np.arange(5, 400, 10))
    found = now_and_then({"now_and_then": {"profiler": times}}, rows, phases)["profiler"]
    assert (found.times, found.more_ns) == (40, {})


def test_what_spans_several_steps_was_on_in_each_of_them():
    rows, phases = steps(np.full(100, 10.0))
    begun, ended = during(rows, np.array([20, 39]))
    found = now_and_then({"now_and_then": {"profiler": [(begun[0], ended[1])]}}, rows, phases)["profiler"]
    assert (found.times, found.share) == (1, 0.2)


def test_what_is_switched_on_as_a_step_ends_is_for_the_next():
    rows, phases = steps(np.full(100, 10.0))
    where = np.arange(5, 95, 10)
    times = [(int(end) - MS // 2, int(end) + 5 * MS) for end in rows[where, 0]]
    found = now_and_then({"now_and_then": {"anomaly": times}}, rows, phases)["anomaly"]
    assert (found.times, found.share) == (9, 0.09)


def test_steps_that_were_left_out_or_came_before_count_for_nothing():
    rows, phases = steps(noisy(100))
    times = during(rows, np.arange(0, 100, 4))
    measured = np.r_[50:100]
    of_these = {phase: each[measured] for phase, each in phases.items()}
    found = now_and_then({"now_and_then": {"profiler": times}}, rows[measured], of_these)["profiler"]
    assert (found.times, found.share) == (12, 0.24)


def test_it_must_be_on_in_some_steps_and_off_in_others():
    rows, phases = steps(noisy(100))
    for where in (np.arange(100), np.arange(98), np.arange(3)):
        told = {"now_and_then": {"profiler": during(rows, where)}}
        assert now_and_then(told, rows, phases) == {}
    assert now_and_then({}, rows, phases) == {}


def test_after_the_last_time_that_was_noted_nothing_is_known():
    forward, where = noisy(1200), np.arange(1, 1200, 2)
    forward[where] += 6.0
    rows, phases = steps(forward)
    told = {"now_and_then": {"anomaly": during(rows, where[:MOST_TIMES])}}
    found = now_and_then(told, rows, phases)["anomaly"]
    assert (found.times, found.share) == (MOST_TIMES, 0.5)
    assert found.more_ns == {Phase.FORWARD: pytest.approx(3 * MS, rel=0.05)}
