"""What the dashboard's benchmark makes of known costs, and the run that it feeds to the pages."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from diagnose.gate.statistics import hodges_lehmann, interval_95
from tests.following import followed, until
from tests.running import REPOSITORY, comes_true

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import dashboard_feed
from dashboard import told
from dashboard_beside import ORDERS, STRETCH_S, Turn, delay_s

STEP_S = 0.010


def trained(stall_s: float, scatter: float, num_turns: int = 32) -> tuple[list[Turn], np.ndarray]:
    """A job that is stalled once in each stretch with the dashboard, on a machine that gets slower."""
    draw = np.random.default_rng(0)
    now, ends, turns = 0.0, [0.0], []
    for number in range(num_turns):
        turn = Turn(arm="free")
        drift = 1 + 0.1 * number / num_turns
        for on in ORDERS[number % len(ORDERS)]:
            begun, stalls = now, [stall_s] if on else []
            slower = drift * (1 + scatter * draw.standard_normal())
            while (now := ends[-1] + STEP_S * slower * draw.lognormal(0, 0.05)) < begun + STRETCH_S:
                if stalls and now > begun + 0.3:
                    now += stalls.pop()
                ends.append(now)
            ends.append(now)
            turn.stretches.append((begun, now, on))
        turns.append(turn)
    return turns, np.array(ends)


@pytest.mark.parametrize("stall_ms", [0.0, 5.0, 20.0])
def test_a_stall_once_a_second_is_found_to_a_fraction_of_one_percent(stall_ms: float) -> None:
    turns, ends_s = trained(stall_ms / 1000, scatter=0.007)
    ratios = [turn.log_ratio(ends_s) for turn in turns]
    low, high = (math.expm1(end) for end in interval_95(ratios))
    assert high - low < 0.01, "what was promised can be told"
    assert math.expm1(hodges_lehmann(ratios)) == pytest.approx(stall_ms / 1000, abs=0.005)
    assert low < stall_ms / 1000 < high


def test_what_breaks_a_promise_is_named() -> None:
    row = {
        "page": "run",
        "painted_s": 2.0,
        "ticks": 12,
        "callback_ms": 49.0,
        "most_ms": 400.0,
        "kilobytes": 30.0,
        "most_kilobytes": 59.0,
        "read_share": 1.0,
        "fed_share": 1.0,
    }
    missed: list[str] = []
    assert told(row, "10", "1", missed) == "| 10 | 1 | run | 2.0 | 49.0 | 400 | 30 | 59 | 12 | 100% |"
    assert missed == []
    told({**row, "callback_ms": 51.0}, "10", "1", missed)
    told({**row, "most_kilobytes": 61.0}, "10", "1", missed)
    told({**row, "fed_share": 0.5}, "10", "1", missed)
    told({**row, "ticks": 0}, "10", "1", missed)
    assert len(missed) == 4


def test_the_run_that_is_fed_has_all_that_a_page_can_draw_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    dashboard_feed.begin(folder, 1000, 8)
    files = [dashboard_feed.opened(folder, rank, 1000) for rank in range(8)]
    time.sleep(0.01)  # so that no two commits are of one instant
    with followed(folder) as live:
        first = until(live, lambda now: now.filled_share == 1.0 and now.world_size == 8)
        steps = dashboard_feed.grow(files, 1000)
        snapshot = until(live, lambda now: now.num_steps == steps)
        drawn = until(live, lambda now: now.lateness is not None and now.lateness.now is not None)
    for file in files:
        file.close()
    assert (first.num_steps, steps) == (1000, 1025)
    assert snapshot.vitals.device is not None and snapshot.loss is not None
    assert len(snapshot.marks) == 100 and snapshot.tuning is not None
    assert not snapshot.refuses and snapshot.notes == ()
    assert drawn.lateness is not None and drawn.lateness.by_meetings
    assert drawn.lateness.now is not None and drawn.lateness.now.rank == dashboard_feed.LATE_RANK


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells of threads on Linux alone")
def test_what_two_processes_on_one_cpu_wait_for_it_is_counted() -> None:
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        assert comes_true(lambda: sum(delay_s(each.pid) for each in both) >= 0.2)
    finally:
        for each in both:
            each.kill()
            each.wait()
    turn = Turn(arm="free", stretches=[(0, 1, True), (1, 2, False), (2, 3, False), (3, 4, True)])
    turn.waited_s = {True: 0.5, False: 0.1}
    assert turn.waits() == pytest.approx(0.2)
