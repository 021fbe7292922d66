"""Time wasted on purpose is reported in the phase and at the line that wasted it, and as much as it was."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from tests.running import REPOSITORY, environment

pytestmark = [pytest.mark.alone, pytest.mark.extended]

BENCHMARKS = REPOSITORY / "benchmarks"
TIMEOUT_S = 300

FAULTS = {
    ("loader", "dataset sleep", "data_wait"),
    ("loader", "dataset sleep", "fetch in the loop"),
    ("loader", "loss busy with beside loss sleep", "forward"),
    ("loader", "beside loss sleep with loss busy", "other"),
    ("loader", "backward busy with optimizer sleep", "backward"),
    ("loader", "optimizer sleep with backward busy", "optimizer"),
    ("loader", "optimizer busy with checkpoint sleep", "optimizer"),
    ("loader", "checkpoint sleep with optimizer busy", "checkpoint"),
    ("loader", "evaluation busy with gc sleep", "evaluation"),
    ("loader", "gc sleep with evaluation busy", "gc"),
    ("get_batch-between", "get_batch busy with beside loss sleep", "data_wait"),
    ("get_batch-between", "beside loss sleep with get_batch busy", "other"),
}


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, ...], str]:
    """The table of `attribution.py --quick`: loop, fault and phase of each row, and its whole line."""
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "attribution.py"), "--quick"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode in (0, 1), ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
    return {tuple(line.split(" | ")[:3]): line for line in lines[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("loop, fault, phase", sorted(FAULTS))
def test_wasted_time_is_found_where_it_was_wasted(rows, loop, fault, phase):
    row = rows[f"| {loop}", fault, phase]
    assert row.endswith("| pass |"), row


@pytest.mark.slow
def test_the_quick_table_has_every_fault_that_is_tested(rows):
    assert {(loop.removeprefix("| "), fault, phase) for loop, fault, phase in rows} == FAULTS


@pytest.fixture
def attribution(monkeypatch) -> ModuleType:
    """The benchmark as a module; its own folder is first on the path, as when it runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("attribution")


@pytest.fixture
def case(attribution):
    return attribution.Case("loader", (attribution.Fault("forward", "busy", 8.0),))


@pytest.fixture
def run(attribution):
    """A run of 12 ms steps in which 8 ms were wasted in the forward pass, and reported there, exactly."""
    (place,) = attribution.lines_of("forward")
    times = {"forward": 9.0, "backward": 2.0, "other": 1.0}
    return attribution.Measured(
        reported=times,
        own=times,
        injected={"forward": 8.0},
        step_ms=12.0,
        where=[{"phase": "forward", "file": place[0], "line": place[1], "in_worker": False}],
        stage_errors={},
        problems=(),
    )


def verdict(attribution, case, run) -> tuple[str, ...]:
    (row,) = attribution.judge(case, run, run)
    return row.problems


def test_a_row_passes_within_three_percent_of_the_step(attribution, case, run):
    near = replace(run, reported={"forward": 9.35, "backward": 1.65, "other": 1.0})
    assert verdict(attribution, case, run) == ()
    assert verdict(attribution, case, near) == ()


def test_a_row_fails_when_time_is_reported_in_another_phase(attribution, case, run):
    far = replace(run, reported={"forward": 8.6, "backward": 2.0, "other": 1.4})
    assert verdict(attribution, case, far) == ("forward off by -0.40 ms", "other off by +0.40 ms")


def test_a_row_fails_when_a_phase_appears_that_took_no_time(attribution, case, run):
    far = replace(run, reported={**run.reported, "gc": 0.5})
    assert verdict(attribution, case, far) == ("gc off by +0.50 ms",)


def test_a_row_fails_when_another_line_is_named(attribution, case, run):
    (wrong,) = [{**line, "line": line["line"] + 1} for line in run.where]
    (_, right) = next(iter(attribution.lines_of("forward")))
    problem = (f"the line is attribution_parts.py:{right}",)
    assert verdict(attribution, case, replace(run, where=[wrong, *run.where])) == problem
    assert verdict(attribution, case, replace(run, where=[])) == problem


def test_a_row_fails_when_the_report_as_a_whole_is_wrong(attribution, case, run):
    assert verdict(attribution, case, replace(run, problems=("shares sum to 0.99",))) == (
        "shares sum to 0.99",
    )


def test_every_place_that_a_run_may_waste_time_at_is_in_the_job(attribution):
    places = {fault.place for case in attribution.CASES for fault in case.faults}
    assert [place for place in sorted(places) if not attribution.lines_of(place)] == []
    assert set(attribution.QUICK) <= set(attribution.CASES)
