"""The device's ledger on a GPU, as its script judges it: what a trace is charged to, what a clock costs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch  # before any test, which would be charged with what torch does as it is imported

from benchmarks import overhead
from tests.fakes import FakeClock, measured

GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def scripts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))


def test_a_trace_is_charged_to_where_work_was_launched_and_to_what_the_host_did_while_there_was_none(
    tmp_path: Path,
) -> None:
    """Slots 1 and 2; a kernel launched in the first runs until the host is far into the second."""
    truth = importlib.import_module("device_ledger_truth")

    def span(cat: str, name: str, ts: float, dur: float, **args: int) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        span("user_annotation", f"{truth.SLOT}1", 0, 0),
        span("user_annotation", f"{truth.MARK}7", 0, 0),
        span("cuda_runtime", "cudaLaunchKernel", 10, 2, correlation=1),
        span("kernel", "a", 20, 100, correlation=1, stream=7),
        span("kernel", "elsewhere", 20, 50, correlation=1, stream=9),
        span("user_annotation", f"{truth.SLOT}2", 30, 0),
        span("cuda_runtime", "cudaStreamSynchronize", 100, 20, correlation=2),
        span("cuda_runtime", "cudaLaunchKernel", 140, 2, correlation=3),
        span("kernel", "b", 150, 40, correlation=3, stream=7),
        span("user_annotation", f"{truth.MARK}8", 160, 0),
        span("kernel", "c", 190, 1, correlation=3, stream=7),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    trace = truth.Truth(path)
    assert trace.between(7, 8) == {1: 120_000, 2: 71_000}
    assert trace.syncs == {"cudaStreamSynchronize": 1}


def ledger_of(
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    cost_us: float,
    seconds: int,
    names: tuple[str, ...] = ("text", "table"),
) -> tuple[int, Any]:
    """What the benchmark of the device's ledger says where each run takes four seconds."""
    benchmark = importlib.import_module("device_ledger")
    now = 0

    def run(
        at: Path, command: list[str], clock: str, *, trace: bool = False, rehearse: bool
    ) -> dict[str, Any]:
        nonlocal now
        now += 4
        traced = (
            {"off_share": 0.01, "worst_slot": "forward", "coverage": 1.0, "slots_ms": {}} if trace else {}
        )
        median_us = 1000 + cost_us * (clock == "on")
        return {"median_us": median_us, "event_us": 2.0, "syncs": {}, **(traced if trace else {})}

    patch.setattr(benchmark, "run", run)
    patch.setattr(benchmark.time, "monotonic", lambda: now)
    arguments = ["--seconds", str(seconds), "--jobs", *names]
    patch.setattr(sys, "argv", ["device_ledger.py", "--out", str(folder), *arguments])
    return benchmark.main(), json.loads((folder / "device_ledger.json").read_text())["jobs"]


def test_what_the_devices_clock_costs_is_judged_by_three_rounds_and_not_by_one(
    tmp_path, monkeypatch, capsys
):
    code, jobs = ledger_of(tmp_path, monkeypatch, cost_us=80, seconds=30)
    assert code == 0
    assert [jobs[name]["passed"]["cheap"] for name in jobs] == [None, None]
    told = capsys.readouterr().out
    assert "| text | 1.00% (forward) | 100% | 1080 | 80 (80 to 80), not judged | 2.0 | 0 |" in told
    assert "| table | 1.00% (forward) | 100% | - | - | - | 0 |" in told, "a trace of each comes first"

    code, jobs = ledger_of(tmp_path, monkeypatch, cost_us=80, seconds=60)
    assert code == 1, "the first had time for as many rounds as it takes"
    assert [jobs[name]["passed"]["cheap"] for name in jobs] == [False, None]
    told = capsys.readouterr().out
    assert told.endswith("1 of 2 jobs pass; not text; what the clock costs is not judged in table\n")


def test_no_third_job_is_traced_in_the_time_that_the_quickest_jobs_rounds_need(
    tmp_path, monkeypatch, capsys
):
    three = ("text", "table", "ResNet")
    code, jobs = ledger_of(tmp_path, monkeypatch, cost_us=10, seconds=45, names=three)
    assert code == 0 and len(jobs) == 2
    assert [jobs[name]["passed"]["cheap"] for name in jobs] == [True, None]
    assert "no time for ResNet" in capsys.readouterr().out
    assert len(ledger_of(tmp_path, monkeypatch, cost_us=10, seconds=50, names=three)[1]) == 3


def test_a_job_that_there_is_no_time_for_is_named_and_is_no_failure(tmp_path, monkeypatch, capsys):
    code, jobs = ledger_of(tmp_path, monkeypatch, cost_us=0, seconds=10)
    assert code == 0
    assert list(jobs) == ["text"]
    told = capsys.readouterr().out
    assert told.endswith(
        "1 of 2 jobs pass; no time for table; what the clock costs is not judged in text\n"
    )


def test_the_arm_without_the_devices_clock_differs_in_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = importlib.import_module("device_ledger_job")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with measured(FakeClock()) as recorder:
        before = list(recorder.looks.cared)
        looks = job.without_clock(recorder.looks.cared)
        assert [look.__module__ for look in looks] == ["diagnose.hooks.device_clock"]
        assert recorder.looks.cared == [look for look in before if look not in looks] != []
        recorder.looks.cared += looks  # each hook takes out what it put in


def test_the_table_of_what_measuring_costs_ends_badly_where_a_run_failed(monkeypatch, capsys):
    def run(tool: str, step_ms: int, steps: int, device: str) -> dict[str, Any]:
        return {"error": ["no such device"]} if tool == "bare" else {"cpu_us": 1.0}

    monkeypatch.setattr(overhead, "run", run)
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--rounds", "1", "--tools", "bare", "diagnose"])
    assert overhead.main() == 1
    assert capsys.readouterr().out.count("failed: no such device") == 2 * len(overhead.STEPS)


def test_a_job_under_a_tool_runs_for_as_many_steps_as_asked_for(monkeypatch, capsys):
    asked = []

    def run(tool: str, step_ms: int, steps: int, device: str) -> dict[str, Any]:
        asked.append((step_ms, steps))
        return {"error": ["not run"]}

    monkeypatch.setattr(overhead, "run", run)
    for more in ([], ["--steps", "7"]):
        words = ["--rounds", "1", "--tools", "bare", "--step-ms", "1", *more]
        monkeypatch.setattr(sys, "argv", ["overhead.py", *words])
        overhead.main()
    assert asked == [(1, overhead.STEPS[1]), (1, 7)]
