"""Two versions at once, each for a moment while the other is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.profile import load_profile, read_logs
from diagnose.analysis.stopped import was_stopped
from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.gate.figures import figures_of
from diagnose.gate.in_turns import stopped_ns, take_turns
from diagnose.gate.measure import OutOfTime, RunPlan, measured_in_turns
from diagnose.gate.noise import advice
from diagnose.gate.pairs import Asked, MeasurePair, run_pairs
from diagnose.gate.result import MeasuredRun, Metric, Side, TrainingFailed
from tests.gates import scripted
from tests.recorded import BATCH, MS, manifest, writer
from tests.running import environment, has_ended, run

DIAGNOSE = (sys.executable, "-m", "diagnose")

NOTES = """
import sys, time
end = time.perf_counter() + float(sys.argv[2])
with open(sys.argv[1], "w", buffering=1) as file:
    while time.perf_counter() < end:
        file.write(f"{time.perf_counter_ns()}\\n")
        time.sleep(0.002)
"""
"""Notes all the time that it runs."""


def noting(folder: Path, name: str, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-E", "-c", NOTES, str(folder / name), str(seconds)]
    return subprocess.Popen(command, start_new_session=True)


def test_each_runs_only_while_the_other_is_stopped(tmp_path: Path) -> None:
    processes = [noting(tmp_path, "one", 1.2), noting(tmp_path, "other", 0.6)]
    away = take_turns(processes, turn_s=0.1)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(away[0]) >= 3
    for name, told in zip(("one", "other"), away, strict=True):
        stops = np.array(told)
        noted = np.loadtxt(tmp_path / name, dtype=np.int64)
        inside = np.searchsorted(stops[:, 0] + 5_000_000, noted) - np.searchsorted(stops[:, 1], noted)
        assert (inside > 0).sum() == 0, "it ran while it was stopped"
    together = sum(
        max(0, min(mine[1], theirs[1]) - max(mine[0], theirs[0])) for mine in away[0] for theirs in away[1]
    )
    assert together < 0.2e9, "hardly ever is nobody's turn"


def test_out_of_time_both_go_on_so_that_they_can_be_ended(tmp_path: Path) -> None:
    processes = [noting(tmp_path, "one", 60), noting(tmp_path, "other", 60)]
    with pytest.raises(subprocess.TimeoutExpired):
        take_turns(processes, turn_s=0.1, timeout_s=0.5)
    for process in processes:
        process.terminate()
        assert process.wait(timeout=10) == -15, "SIGTERM does not end what is stopped"


TAKES_TURNS = """
import subprocess, sys
from diagnose.gate.in_turns import take_turns
sleeps = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)"]
processes = [subprocess.Popen(sleeps, start_new_session=True) for _ in range(2)]
print(*(process.pid for process in processes), flush=True)
take_turns(processes, turn_s=0.05)
"""


def test_a_gate_that_is_killed_leaves_nothing_that_is_stopped_for_ever() -> None:
    gate = subprocess.Popen(
        [sys.executable, "-c", TAKES_TURNS], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert gate.stdout is not None
    pids = [int(word) for word in gate.stdout.readline().split()]
    time.sleep(0.4)
    gate.kill()
    gate.wait(timeout=10)
    assert all(has_ended(pid, within_s=10) for pid in pids)


def test_steps_in_which_it_was_stopped_are_known() -> None:
    end_N, time_N = np.array([10, 20, 70, 80, 140, 150]), np.array([10, 10, 50, 10, 60, 10])
    stops = [(30, 65), (85, 130)]
    assert was_stopped(end_N, time_N, stops).tolist() == [False, False, True, False, True, False]
    assert not was_stopped(end_N, time_N, []).any()
    assert np.flatnonzero(was_stopped(end_N, time_N, [(65, 75)])).tolist() == [2, 3]
    assert [stopped_ns(stops, moment) for moment in (20, 50, 100, 500)] == [0, 20, 50, 80]
    assert [stopped_ns(stops, 100, since_ns=moment) for moment in (20, 50, 70, 90)] == [50, 30, 15, 10]


def test_the_mean_has_the_stall_in_which_it_was_stopped_and_startup_each_stop_once(tmp_path: Path) -> None:
    """100 steps of 10 ms from 1 s on; one of them takes 510 ms, for 300 of which it is stopped."""
    manifest(tmp_path)
    rows_ms = [[1000 + 10 * step, 10] for step in range(1, 101)]
    for step in range(50, 100):
        rows_ms[step][0] += 500
    rows_ms[50][1] += 500
    file = writer(tmp_path)
    for end_ms, took_ms in rows_ms:
        row = dict.fromkeys(COLUMNS, 0) | {"end_ns": end_ms * MS, "samples": BATCH, "forward": took_ms * MS}
        file.add_steps([tuple(row.values())])
    file.close()
    logs, _ = read_logs(tmp_path)
    stops_ms = [(0, 100), (150, 450), (900, 950), (1600, 1900)]
    stops = [(stop * MS, go_on * MS) for stop, go_on in stops_ms]
    found = figures_of(logs, 20, 200 * MS, stops)
    assert found.num_steps == 79
    assert found.figures[Metric.STEP_MS] == pytest.approx(10)
    assert found.figures[Metric.MEAN_SAMPLES_PER_S] == pytest.approx(80 * BATCH / (0.8 + 0.5 - 0.3))
    assert found.figures[Metric.STARTUP] == pytest.approx(1.01 - 0.2 - 0.25 - 0.05)


SCRIPT = """
import sys, time, torch
from torch import nn
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.zeros(4, 8)).sum().backward()
    time.sleep(float(sys.argv[1]))
    optimizer.step()
"""


def sides(folder: Path, *waits_s: float) -> list[Side]:
    (folder / "a.py").write_text(SCRIPT)
    return [Side(label="base", name="a", root=folder, command=("a.py", str(wait))) for wait in waits_s]


@pytest.mark.extended
def test_real_runs_at_once_have_the_figures_that_they_have_alone(tmp_path: Path) -> None:
    plan = RunPlan(steps=120)
    names = ("base-01", "head-01")
    one, other = measured_in_turns(sides(tmp_path, 0.006, 0.009), names, tmp_path / "runs", plan)
    for measured, wait_ms in ((one, 6), (other, 9)):
        assert wait_ms < measured.figures[Metric.STEP_MS] < 1.8 * wait_ms, "the other's turns are not in it"
        assert 80 < measured.num_steps < 120, "some of 120 steps were interrupted"
        assert measured.machine.foreign_cpus is None
        assert measured.startup_s < measured.wall_s / 2
        profile = load_profile(measured.folder)
        assert 0.9 * wait_ms < profile.phase_time_ns[Phase.OTHER] / 1e6 < 1.8 * wait_ms, (
            "nor in what is analysed"
        )
        assert 0 < 120 - measured.num_steps <= profile.steps.left_out < 50, "and those of the warm-up"
    assert measured.wall_s > 120 * 0.015


@pytest.mark.extended
def test_of_two_the_one_that_fails_is_named_and_both_are_over(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import time; time.sleep(0.5); raise SystemExit('no data')")
    good = sides(tmp_path, 0.005)[0]
    bad = replace(good, label="head", command=("fails.py",))
    with pytest.raises(TrainingFailed, match="head-01 ended with exit code 1"):
        measured_in_turns([good, bad], ("base-01", "head-01"), tmp_path / "runs", RunPlan(steps=30))


def test_a_pair_that_hangs_is_ended_and_what_it_wrote_last_is_told(tmp_path: Path) -> None:
    text = "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(60)"
    (tmp_path / "hangs.py").write_text(text)
    side = Side(label="base", name="a", root=tmp_path, command=("hangs.py",))
    plan = RunPlan(timeout_s=3.0)
    with pytest.raises(OutOfTime) as late:
        measured_in_turns([side, side], ("base-01", "head-01"), tmp_path / "runs", plan)
    assert late.value.last_lines == ("waiting",)


def pairs_of(ratio: float) -> tuple[MeasurePair, list[tuple[str, ...]]]:
    """What makes a pair at once, and the names that it was asked for."""
    asked: list[tuple[str, ...]] = []
    measure = scripted({"base": 10, "head": 10 * ratio})

    def measure_pair(
        order: Sequence[int], names: Sequence[str], plan: RunPlan, turn_s: float
    ) -> list[MeasuredRun]:
        asked.append(tuple(names))
        assert turn_s == 0.3
        return [measure(side, name, plan) for side, name in zip(order, names, strict=True)]

    return measure_pair, asked


def test_pairs_are_made_at_once_and_each_side_begins_every_other_time() -> None:
    measure_pair, names = pairs_of(1.2)
    rehearse = scripted({"base": 10, "head": 12})
    paired = run_pairs(rehearse, Asked(in_turns=True), measure_pair=measure_pair)
    assert len(rehearse.plans) == 2
    assert names[:3] == [("base-01", "head-01"), ("head-02", "base-02"), ("base-03", "head-03")]
    assert [pair.base_first for pair in paired.pairs[:3]] == [True, False, True]
    assert all(pair.base.name.startswith("base") for pair in paired.pairs)
    assert paired.judgement.drop == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"device": "cuda"}, "uses cuda, which works on"), ({"ranks": (0, 1)}, "of several ranks")],
)
def test_what_cannot_be_stopped_for_a_moment_is_refused(changes: dict[str, Any], reason: str) -> None:
    rehearse = scripted({"base": 10, "head": 10})
    with pytest.raises(DiagnoseError, match=reason):
        run_pairs(
            lambda *call: replace(rehearse(*call), **changes),
            Asked(in_turns=True),
            measure_pair=pairs_of(1.0)[0],
        )


def test_where_the_clock_cannot_tell_turns_are_advised_if_they_can_be_taken() -> None:
    said = advice((), Metric.SAMPLES_PER_S, (), "", may_take_turns=True)
    assert "--in-turns" in said
    assert "--in-turns" not in advice((), Metric.SAMPLES_PER_S, (), "", may_take_turns=False)
    assert "--in-turns" not in advice((), Metric.PEAK_MEMORY, (), "", may_take_turns=True)


def test_a_baseline_has_nobody_to_take_turns_with(tmp_path: Path) -> None:
    ended = run(*DIAGNOSE, "gate", "--in-turns", "--baseline", "b", "--", "a.py", cwd=tmp_path)
    assert ended.code == 2
    assert "--in-turns is for two versions" in ended.stderr


@pytest.mark.extended
def test_a_slower_head_is_found_in_turns_with_its_phase(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCRIPT)
    commands = ("--base-cmd", "a.py 0.006", "--head-cmd", "a.py 0.008", "--steps", "100")
    ended = run(*DIAGNOSE, "gate", "--in-turns", *commands, "--json", "-", cwd=tmp_path)
    answer = json.loads(ended.stdout)
    assert ended.code == 1, ended.stderr
    assert answer["verdict"] == "regression"
    assert any("in turns" in note for note in answer["notes"])
