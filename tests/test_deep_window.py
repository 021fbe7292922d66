"""Deep windows of real jobs on the CPU: what they record, and that the script is none the wiser."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import diagnose
from diagnose.analysis.deep_window import (
    TO_THE_END,
    deep_window_of,
    device_readings,
    spoilt_steps,
    untold_window,
    without_steps,
)
from diagnose.analysis.profile import load_profile, load_series
from diagnose.analysis.trace import read_trace
from diagnose.core.deep_window import (
    OURS,
    ClassTime,
    Counted,
    DeepWindow,
    Rates,
    Sync,
    Trace,
    Work,
    WorkClass,
)
from diagnose.core.device import Device
from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.hooks._recorder import Recorder
from diagnose.launch import deep_window, deep_window_profiler, deep_window_under_way
from diagnose.launch.deep_window_count import Counting
from diagnose.launch.deep_window_file import pack
from diagnose.launch.deep_window_profiler import Profiler
from diagnose.launch.deep_window_rules import TOLD
from diagnose.launch.settings import resolve
from diagnose.report import to_json
from diagnose.report.base import Table
from diagnose.report.deep_window import DeepWindowSection, roofline
from diagnose.rules._engine import ask, built_in
from diagnose.rules._examples import profile
from diagnose.rules.launch_bound import EXPECTED
from diagnose.store.reader import RankLog, read_rank
from tests.running import DIAGNOSE, PLAIN, REPOSITORY, SCRIPTS, Ended, run

SCRIPT = SCRIPTS / "windowed.py"


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled counts no operations, and tests that ran before may have."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "counters", defaultdict(Counter))


def windowed(folder: Path, *arguments: object, option: str = "10:3") -> tuple[Ended, Ended, Profile]:
    """Runs the script plain and with a deep window; returns both ends and the run's profile."""
    plain = run(*PLAIN, SCRIPT, *arguments, cwd=folder)
    command = (*DIAGNOSE, "--quiet", "--name", "r", "--deep-window", option, SCRIPT, *arguments)
    ended = run(*command, cwd=folder)
    return plain, ended, load_profile(folder / ".diagnose" / "runs" / "r")


def events_of(folder: Path) -> list[dict[str, Any]]:
    log = read_rank(folder / ".diagnose" / "runs" / "r" / "rank0.sqlite")
    return [detail for _, _, kind, detail in log.events if kind == "deep-window"]


# -- real jobs


def test_a_window_records_what_was_asked_for_and_the_script_is_the_same(tmp_path: Path) -> None:
    plain, ended, profile = windowed(tmp_path)
    assert (ended.code, ended.stdout, ended.stderr) == (plain.code, plain.stdout, plain.stderr)
    window = profile.deep_window
    assert window is not None and window.asked_by == "option"
    assert (window.first_step, window.num_steps) == (10, 3)
    assert profile.steps.left_out == window.left_out >= 5, "one to count in, three, one to stop in"
    assert profile.steps.measured == 30 - profile.steps.warmup - window.left_out
    times = {each.work: each for each in window.trace.classes}
    counts = {each.name: each.count for each in window.trace.top}
    assert (counts["aten::addmm"], counts["aten::mm"]) == (6, 9), "in three steps of two layers"
    assert {WorkClass.NORM, WorkClass.OPTIMIZER} <= set(times)
    assert 0 < sum(each.total_ns for each in window.trace.classes) <= window.wall_ns
    assert window.counted is not None and window.counted.dtype == "float32"
    assert window.usual_step_ns == pytest.approx(sum(profile.phase_time_ns.values()))
    assert window.counted.flops == 2 * 8 * (32 * 64 * 2 + 64 * 4 * 3)
    line = next(
        number
        for number, text in enumerate(SCRIPT.read_text().splitlines(), start=1)
        if "total += loss.item()" in text
    )
    lines = [(each.what, each.file, each.line) for each in window.counted.lines]
    assert ("aten::_local_scalar_dense", str(SCRIPT), line) in lines
    run_folder = tmp_path / ".diagnose" / "runs" / "r"
    assert (run_folder / window.trace_file).stat().st_size == window.trace_bytes < 1_000_000
    assert (run_folder / "deep-rank0-step10.summary.json").is_file(), "it is read once"
    assert load_profile(run_folder).deep_window == window
    assert json.loads(json.dumps(to_json(profile)))["deep_window"]["first_step"] == 10
    assert len(load_series(run_folder).samples) == profile.steps.measured
    assert not [path for path in run_folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.extended) for kind in ("raises", "interrupted", "warns")],
)
def test_what_the_script_raises_or_warns_inside_a_window_is_its_own(tmp_path: Path, kind: str) -> None:
    plain, ended, _ = windowed(tmp_path, kind)
    assert (ended.code, ended.stdout, ended.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert next(each["state"] for each in events_of(tmp_path)) == "begun"


@pytest.mark.extended
def test_the_scripts_own_profiler_goes_before_ours(tmp_path: Path) -> None:
    plain, ended, profile = windowed(tmp_path, "profiler")
    assert plain.stdout.count("addmm") == ended.stdout.count("addmm") > 0
    assert (ended.code, ended.stdout) == (plain.code, plain.stdout)
    told = [line for line in plain.stderr.splitlines() if "USDT" not in line]
    assert [line for line in ended.stderr.splitlines() if "USDT" not in line] == told
    assert ended.stderr.count("USDT") == plain.stderr.count("USDT"), "theirs still speaks"
    assert profile.deep_window is None
    assert [(each["state"], each.get("reason")) for each in events_of(tmp_path)] == [
        ("begun", None),
        ("undone", "the script's own profiler began"),
    ]
    assert profile.steps.left_out >= 3
    assert profile.notes == ("There is no deep window: the script's own profiler began.",)


def test_a_window_is_there_as_soon_as_its_file_is_whatever_becomes_of_the_process(tmp_path: Path) -> None:
    """It kills itself in the moment in which the file appears: its last records are lost."""
    command = (*DIAGNOSE, "--quiet", "--name", "r", "--deep-window", "10:3", SCRIPT, "killed")
    assert run(*command, cwd=tmp_path).code == -signal.SIGKILL
    profile = load_profile(tmp_path / ".diagnose" / "runs" / "r")
    window = profile.deep_window
    assert window is not None and (window.first_step, window.num_steps) == (10, 3)
    assert {each.name: each.count for each in window.trace.top}["aten::addmm"] == 6
    assert not [note for note in profile.notes if "window" in note]


UNSURE = '''"""A rule that lacks what only a window tells."""
from diagnose.rules import Rule

class Unsure(Rule):
    needs = ("device.num_kernels",)

    def check(self, profile):
        return None
'''


@pytest.mark.extended
@pytest.mark.parametrize("is_unsure", [True, False], ids=["a rule is unsure", "no rule is"])
def test_rules_that_lack_what_a_window_tells_get_one(tmp_path: Path, is_unsure: bool) -> None:
    """A package with such a rule is installed, as no rule of ours lacks a device's readings on a CPU."""
    info = tmp_path / "site" / "unsure-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unsure\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[diagnose.rules]\nunsure = unsure\n" if is_unsure else "")
    (tmp_path / "site" / "unsure.py").write_text(UNSURE)
    kind = "until-window" if is_unsure else "until-asked"
    command = (*DIAGNOSE, "--quiet", "--name", "r", "--deep-window", "auto", SCRIPT, kind, 60)
    path = os.pathsep.join((str(tmp_path / "site"), str(REPOSITORY)))
    ended = run(*command, cwd=tmp_path, PYTHONPATH=path)
    assert ended.code == 0, ended.stderr
    profile = load_profile(tmp_path / ".diagnose" / "runs" / "r")
    if not is_unsure:
        assert profile.deep_window is None and profile.steps.left_out == 0
        assert profile.notes == ("There is no deep window: no rule asked for one.",)
        return
    window = profile.deep_window
    assert window is not None and window.asked_by == "unsure"
    assert window.num_steps == 3 and window.first_step >= deep_window.LOOK_AT_RULES_AFTER
    assert profile.steps.left_out == window.left_out
    assert {each.name: each.count for each in window.trace.top}["aten::addmm"] == 6


@pytest.mark.extended
def test_a_window_at_the_end_keeps_the_steps_that_there_were(tmp_path: Path) -> None:
    plain, ended, profile = windowed(tmp_path, "", 12, option="9:5")
    assert (ended.code, ended.stdout, ended.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert profile.deep_window is not None
    assert (profile.deep_window.first_step, profile.deep_window.num_steps) == (9, 3)


@pytest.mark.extended
def test_a_window_after_the_end_is_said_not_to_have_been(tmp_path: Path) -> None:
    _, ended, profile = windowed(tmp_path, option="500")
    assert ended.code == 0 and profile.deep_window is None and profile.steps.left_out == 0
    assert [(each["state"], each["reason"]) for each in events_of(tmp_path)] == [
        ("refused", "the training ended before")
    ]
    assert profile.notes == ("There is no deep window: the training ended before.",)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["compile", "bare"])
def test_compiled_code_and_a_loop_without_a_loader_are_recorded_too(tmp_path: Path, kind: str) -> None:
    plain, ended, profile = windowed(tmp_path, kind)
    assert (ended.code, ended.stdout, ended.stderr) == (plain.code, plain.stdout, plain.stderr)
    window = profile.deep_window
    assert window is not None and window.num_steps == 3
    assert {each.name: each.count for each in window.trace.top}["aten::mm"] == 9
    assert bool(window.counted) == (kind == "bare")
    assert ("compiled code" in window.why_not_counted) == (kind == "compile")


def test_a_window_in_which_no_step_ends_any_more_is_ended_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIAGNOSE_DEEP_WINDOW", "4:5")
    monkeypatch.setattr(deep_window_under_way, "LONGEST_NS", 10**9)
    monkeypatch.setattr(deep_window_under_way, "LONGEST_STEPS", 0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    diagnose.attach(tmp_path / "r")
    for batch in torch.utils.data.DataLoader(torch.ones(14, 4), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if torch._C._autograd._profiler_enabled():
            break
    else:
        pytest.fail("nothing was recorded")
    until = time.monotonic() + 60
    while torch._C._autograd._profiler_enabled() and time.monotonic() < until:
        time.sleep(0.01)  # an evaluation, say
    assert not torch._C._autograd._profiler_enabled()
    diagnose.detach()
    log = read_rank(tmp_path / "r" / "rank0.sqlite")
    told = [(d["state"], d.get("reason")) for _, _, kind, d in log.events if kind == "deep-window"]
    assert told == [("begun", None), ("undone", "no step ended for long")]


# -- what is undone, and what is waited for


def stepping(recorder: Recorder, num_steps: int) -> None:
    for _ in range(num_steps):
        recorder.batch_asked()
        torch.ones(2) + 1
        recorder.optimizer_stepped(1)


def told(recorder: Recorder) -> list[tuple[str, Any]]:
    return [(detail["state"], detail.get("reason")) for *_, detail in recorder.events]


def test_what_counts_leaves_the_thread_also_where_its_window_is_ended_inside_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has taken it off the stack there, and puts it back."""
    recorder = Recorder()
    windows = deep_window.DeepWindows(recorder, tmp_path, "3:2")
    monkeypatch.setattr(Counting, "_count", lambda *_: windows._end("it took long"))
    stepping(recorder, 3)
    assert torch._C._len_torch_dispatch_stack() == 1
    assert told(recorder) == [("begun", None)]
    assert "being taken already" in windows.ask()
    stepping(recorder, 1)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert told(recorder) == [("begun", None), ("undone", "it took long")]
    stepping(recorder, 1)
    assert recorder.on_boundary is None
    assert windows.ask() == ""


def test_a_window_that_ends_while_the_profiler_is_made_ready_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start of a device's tracing may take seconds."""
    prepare = Profiler.prepare
    overdue = []

    def ended(self: Profiler) -> None:
        prepare(self)
        assert windows._window is not None
        overdue.append(windows._window.is_overdue())
        windows._end("it took long")

    monkeypatch.setattr(deep_window_under_way, "LONGEST_NS", 0)
    monkeypatch.setattr(deep_window_under_way, "LONGEST_STEPS", 0)
    monkeypatch.setattr(Profiler, "prepare", ended)
    recorder = Recorder()
    windows = deep_window.DeepWindows(recorder, tmp_path, "3:2")
    stepping(recorder, 6)
    assert overdue == [False], "it has not begun"
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch._C._autograd._profiler_enabled()
    assert told(recorder) == [("begun", None), ("undone", "it took long")]


MS = 1_000_000


def test_a_window_is_not_ended_from_outside_while_it_begins_or_ends_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the device there may take as long as a window may."""
    recorder = Recorder()
    windows = deep_window.DeepWindows(recorder, tmp_path, "3:2")
    told_to_end = []

    def wait(self: Profiler) -> None:
        window = windows._window
        assert window is not None
        windows._end_from_outside(window)
        until = time.monotonic() + 60
        while window.is_told and time.monotonic() < until:  # the call comes between two instructions
            pass
        told_to_end.append(window.is_told)

    monkeypatch.setattr(Profiler, "wait", wait)
    stepping(recorder, 6)
    windows.finish()
    assert told_to_end == [False, False], "it may be told again"
    assert [state for state, _ in told(recorder)] == ["begun", "ended"]


class OnDevice:
    """Has its parameters on the second device."""

    def parameters(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1")]


@pytest.mark.parametrize("capturing", [False, True])
def test_the_models_device_has_nothing_to_do_where_recording_begins_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    did: list[str] = []

    def synchronize(index: int) -> None:
        time.sleep(0.3)
        did.append(f"waited for {index}")

    def noted(name: str) -> None:
        original = getattr(Profiler, name)
        monkeypatch.setattr(Profiler, name, lambda self: (did.append(name), original(self)))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    noted("start")
    noted("stop")
    recorder, model = Recorder(), OnDevice()
    recorder.met.modules.append(weakref.ref(model))
    windows = deep_window.DeepWindows(recorder, tmp_path, "3:2")
    stepping(recorder, 6)
    windows.finish()
    waited = [] if capturing else ["waited for 1"]
    assert did == [*waited, "start", *waited, "stop"]
    (file,) = tmp_path.glob("*.window.json")
    wall_ns = json.loads(file.read_text())["wall_ns"]
    assert capturing or 300 * MS <= wall_ns < 600 * MS, "what the device had still to do is the steps'"
    (packed,) = tmp_path.glob("*.trace.json.gz")
    recorded = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
    ours = [each["dur"] for each in recorded if each.get("name") == OURS]
    assert len(ours) == (not capturing) and all(each >= 300_000 for each in ours), "us, around our wait"


# -- which steps no figure is of


def log_of(num_steps: int, *events: tuple[int, str, dict[str, Any]]) -> RankLog:
    steps = np.zeros((num_steps, len(COLUMNS)), dtype=np.int64)
    steps[:, 0] = np.arange(num_steps)
    return RankLog(
        path=Path("rank0.sqlite"),
        steps=steps,
        samples=[(step, 0, (), 1) for step in range(num_steps)],
        events=[(0, step, kind, detail) for step, kind, detail in events],
        vitals=[(step, step, {}) for step in range(num_steps)],
    )


def test_the_steps_of_windows_are_gone_and_the_others_keep_their_order() -> None:
    log = log_of(
        12,
        (2, "deep-window", {"state": "begun", "first": 3}),
        (5, "deep-window", {"state": "ended", "last": 5}),
        (8, "checkpoint", {}),
        (8, "deep-window", {"state": "begun", "first": 8}),
        (8, "deep-window", {"state": "undone", "last": 9}),
    )
    assert spoilt_steps(log) == ((3, 5), (8, 9))
    rest = without_steps(log, spoilt_steps(log))
    assert rest.steps[:, 0].tolist() == [0, 1, 2, 6, 7, 10, 11]
    assert [step for step, *_ in rest.samples] == [step for _, step, _ in rest.vitals] == list(range(7))
    assert [step for _, step, kind, _ in rest.events if kind == "checkpoint"] == [5]
    part = without_steps(log_of(6), spoilt_steps(log), first=4)
    assert part.steps[:, 0].tolist() == [2, 3], "4 and 5, then 8 and 9 of the run"


def test_a_process_that_did_not_live_to_end_its_window_has_no_step_after_it() -> None:
    log = log_of(6, (4, "deep-window", {"state": "begun", "first": 4}))
    assert spoilt_steps(log) == ((4, TO_THE_END),)
    assert len(without_steps(log, spoilt_steps(log)).steps) == 4
    assert untold_window(log, is_over=False) == []
    [note] = untold_window(log, is_over=True)
    assert "ended in the deep window that began at step 4;" in note


def test_a_window_that_is_there_ends_where_its_file_says(tmp_path: Path) -> None:
    """The events of its end, and in the second case of its beginning too, were lost."""
    told = {"rank": 0, "first_step": 5, "num_steps": 2, "trace_file": "t", "counted": None}
    begun = (4, "deep-window", {"state": "begun", "first": 4})
    file = tmp_path / "deep-rank0-step5.window.json"
    for events in ((begun,), ()):
        log = replace(log_of(12, *events), path=tmp_path / "rank0.sqlite", meta={"pid": 7})
        file.write_text(json.dumps({**told, "pid": 7, "spoilt": [4, 8]}))
        assert spoilt_steps(log) == ((4, 8),)
        assert untold_window(log, is_over=True) == []
        assert deep_window_of(log) is not None
    other = replace(log, meta={"pid": 8})
    assert deep_window_of(other) is None and spoilt_steps(other) == (), "another process of that rank"
    file.write_text(json.dumps(told))
    assert deep_window_of(log) is None, "an older version said in an event alone that it had ended"
    ended = (8, "deep-window", {"state": "ended", "last": 9})
    assert deep_window_of(replace(log, events=log_of(1, begun, ended).events)) is not None


def test_a_window_that_was_taken_after_all_is_not_said_to_be_missing() -> None:
    undone = (2, "deep-window", {"state": "undone", "last": 3, "reason": "the script started a process"})
    begun = (4, "deep-window", {"state": "begun", "first": 4})
    ended = (5, "deep-window", {"state": "ended", "last": 6})
    assert untold_window(log_of(8, undone), is_over=True) == [
        "There is no deep window: the script started a process."
    ]
    assert untold_window(log_of(8, undone, begun, ended), is_over=True) == []


def test_a_run_that_ends_while_the_rules_are_asked_looks_no_more(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.steps = deep_window.LOOK_AT_RULES_AFTER
    windows = deep_window.DeepWindows(recorder, tmp_path, "auto")
    windows.look()
    question = windows._question
    assert question is not None
    windows.finish()
    windows.look()
    assert windows._question is None
    assert question.answer() == []


# -- what a window says


def window(**changes: Any) -> DeepWindow:
    made: dict[str, Any] = {"rank": 0, "first_step": 4, "num_steps": 2, "wall_ns": 2_000_000, **changes}
    return DeepWindow(**made)


def test_the_readings_of_the_device_are_those_of_the_trace() -> None:
    trace = Trace(
        num_kernels=30,
        busy_ns=500_000,
        kernel_ns=400_000,
        tensor_core_ns=100_000,
        layout_ns=40_000,
        sm_share=0.5,
        classes=(
            ClassTime(work=WorkClass.MATRIX, count=3, total_ns=150_000),
            ClassTime(work=WorkClass.ATTENTION, count=1, total_ns=50_000),
        ),
    )
    assert device_readings(window(trace=trace)) == {
        "busy_share": 0.25,
        "launch_bound_ns": None,
        "num_kernels": 15.0,
        "tensor_core_share": 0.25,
        "matmul_share": 0.4,
        "layout_share": 0.08,
        "sm_share": 0.5,
    }
    assert device_readings(window()) == device_readings(None) == {}, "a CPU has no kernels"


def test_shares_of_the_time_are_of_a_usual_step_and_not_of_one_that_recording_slows_down() -> None:
    counted = Counted(
        work=(Work(work=WorkClass.MATRIX, count=2, flops=3_000_000, num_bytes=1_000),), dtype="float32"
    )
    made = window(
        trace=Trace(num_kernels=30, busy_ns=800_000, kernel_ns=800_000, launch_bound_ns=900_000),
        counted=counted,
        rates=Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e10),
    )
    slowed, usual = (replace(made, usual_step_ns=step_ns) for step_ns in (0.0, 500_000.0))
    assert (device_readings(slowed)["busy_share"], device_readings(usual)["busy_share"]) == (0.4, 0.8)
    assert device_readings(slowed)["launch_bound_ns"] == 450_000
    assert device_readings(usual)["launch_bound_ns"] == 100_000, "what kernels leave of a usual step"
    assert device_readings(replace(usual, usual_step_ns=300_000.0))["busy_share"] == 1.0
    assert (slowed.mfu, usual.mfu) == (pytest.approx(0.3), pytest.approx(0.6))
    drawn = roofline(usual)
    assert drawn is not None and drawn.points[-1].flops_per_s == pytest.approx(6e9)
    untold = replace(made, trace=replace(made.trace, launched_share=0.1))
    assert device_readings(untold)["launch_bound_ns"] is None


def test_what_a_window_reads_is_enough_for_the_rules_of_idleness() -> None:
    trace = Trace(num_kernels=6_000, busy_ns=80_000_000, kernel_ns=80_000_000, launch_bound_ns=150_000_000)
    made = window(trace=trace, wall_ns=300_000_000, usual_step_ns=100e6)
    readings = device_readings(made)
    assert set(readings) >= {name.removeprefix("device.") for name in TOLD}
    told = Device(name="a card", capability=(8, 0), **readings)
    rules = {name: built_in()[name] for name in ("launch-bound", "data-parallel")}
    (found,), abstained = ask(rules, profile(device=told))
    assert not abstained and found.rule == "launch-bound"
    assert sum(found.lost_ns.values()) == pytest.approx(EXPECTED * 60e6), "of 100 ms 40 are kernels'"
    assert set(found.lost_ns) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    fed_slowly, _ = ask(rules, profile(device=told, data_wait_ms=55))
    assert not fed_slowly, "most of the idleness is the wait for data"
    replicas = Model(kind="Net", device="cuda", is_data_parallel=True, num_replicas=2)
    driven, _ = ask(rules, profile(device=told, program=Program(models=(replicas,))))
    assert "data-parallel" in {finding.rule for finding in driven}


def test_utilisation_is_the_products_over_the_roof_and_unknown_without_one() -> None:
    counted = Counted(
        work=(Work(work=WorkClass.MATRIX, count=2, flops=3_000_000, num_bytes=1_000),), dtype="float32"
    )
    rates = Rates(device="cpu", copy_bytes_per_s=1e9, flops_per_s=1e10)
    assert window(counted=counted).mfu is None and roofline(window(counted=counted)) is None
    assert window(counted=counted, rates=rates).mfu == pytest.approx(0.3)
    trace = Trace(classes=(ClassTime(work=WorkClass.MATRIX, count=4, total_ns=1_000_000),))
    drawn = roofline(window(counted=counted, rates=rates, trace=trace))
    assert drawn is not None
    assert [(point.label, point.flops_per_byte) for point in drawn.points] == [
        ("matrix", 3000.0),
        ("whole step", 3000.0),
    ]
    assert [point.flops_per_s for point in drawn.points] == pytest.approx([6e9, 3e9])


def test_a_trace_without_most_of_its_kernels_gives_no_figure_per_step() -> None:
    counted = Counted(
        work=(Work(work=WorkClass.MATRIX, count=2, flops=3_000_000, num_bytes=1_000),), dtype="float32"
    )
    rates = Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e10)
    classes = (ClassTime(work=WorkClass.MATRIX, count=4, total_ns=1_000_000),)
    for share, is_whole in ((0.95, True), (0.94, False)):
        trace = Trace(
            num_kernels=4, busy_ns=9, kernel_ns=10, span_ns=99, classes=classes, launched_share=share
        )
        made = window(counted=counted, rates=rates, trace=trace)
        readings = device_readings(made)
        assert readings["matmul_share"] == 1
        for figure in (readings["num_kernels"], readings["busy_share"], made.mfu, roofline(made)):
            assert (figure is not None) is is_whole
        section = DeepWindowSection().blocks(replace(profile(), deep_window=made))
        assert ("has the kernels of 94 % of the launches alone" in section[0].text) is not is_whole
        labels = {fact.label for fact in section[1].items}
        assert ({"kernels", "busy", "utilisation"} <= labels) is is_whole
        (cells,) = (row.cells for block in section if isinstance(block, Table) for row in block.rows)
        assert (cells[-1] != "") is is_whole


def kept(folder: Path, *events: dict[str, Any], **more: Any) -> RankLog:
    """A rank with a window whose products were counted, and this trace; `more` was counted too."""
    counted = {
        "work": [
            {"work": "matrix", "count": 1, "flops": 1_000, "num_bytes": 10},
            {"work": "attention", "count": 1, "flops": 0, "num_bytes": 10},
        ][: 1 + any(each["name"] == "uncounted" for each in events)],
        "dtype": "bfloat16",
        "lines": [{"what": "aten::item", "count": 1, "blocked_ns": 5, "file": "a.py", "line": 3}],
    }
    told = {"rank": 0, "first_step": 5, "num_steps": 1, "wall_ns": 1_000, "trace_file": "t.json"}
    (folder / "t.json").write_text(json.dumps({"traceEvents": events}))
    file = folder / "deep-rank0-step5.window.json"
    file.write_text(json.dumps({**told, "counted": {**counted, **more}, "pid": 7, "spoilt": [4, 8]}))
    meta = {"pid": 7, "device_name": "the first", "facts": {"device": {"name": "the second"}}}
    return replace(log_of(12), path=folder / "rank0.sqlite", meta=meta)


def ran(category: str, name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": 1, "dur": 2}


GEMM = ran("kernel", "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn")


@pytest.mark.parametrize(
    "events, why",
    [
        ((GEMM,), ""),
        ((GEMM, ran("cuda_runtime", "cudaGraphLaunch")), "launch graphs"),
        ((GEMM, ran("kernel", "flash_fwd_kernel")), "attention of a kind"),
        ((GEMM, ran("cpu_op", "uncounted")), "attention of a kind"),
    ],
    ids=["counted", "a graph", "attention that nobody saw", "attention without a formula"],
)
def test_products_that_were_not_all_counted_give_no_utilisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: tuple[dict[str, Any], ...], why: str
) -> None:
    asked = []

    def rates(device: str, dtype: str) -> Rates:
        asked.append((device, dtype))
        return Rates(device=device, copy_bytes_per_s=1e9, flops_per_s=1e9)

    monkeypatch.setattr("diagnose.analysis.deep_window.read_rates", rates)
    log = kept(tmp_path, *events)
    for _ in range(2):  # of the trace, then of its summary
        found = deep_window_of(log)
        assert found is not None and found.counted is not None
        assert found.mfu == (None if why else 1.0)
        assert (why in found.why_not_counted) if why else not found.why_not_counted
        assert found.counted.lines[0].line == 3, "where it waited is known all the same"
    assert asked == [("the second", "bfloat16")] * 2, "the model's device, not the first in use"


def test_products_without_a_formula_are_named_and_give_no_utilisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e9)
    monkeypatch.setattr("diagnose.analysis.deep_window.read_rates", lambda device, dtype: known)
    found = deep_window_of(kept(tmp_path, GEMM, unknown="aten::_cudnn_rnn"))
    assert found is not None and found.mfu is None and roofline(found) is None
    assert found.why_not_counted == "the steps call aten::_cudnn_rnn, whose products cannot be counted"


def test_a_trace_of_a_job_on_a_device_that_has_no_kernel_is_not_read_as_one_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e9)
    monkeypatch.setattr("diagnose.analysis.deep_window.read_rates", lambda device, dtype: known)
    on_cpu = kept(tmp_path, ran("cpu_op", "aten::mm"))
    facts = {**on_cpu.meta["facts"], "accelerator": "cuda"}
    for log, is_told in ((on_cpu, True), (replace(on_cpu, meta={**on_cpu.meta, "facts": facts}), False)):
        found = deep_window_of(log)
        assert found is not None
        section = DeepWindowSection().blocks(replace(profile(), deep_window=found))
        assert ("It has no kernel, though the model is on a device" in section[0].text) is not is_told
        tables = [block.caption for block in section if isinstance(block, Table)]
        assert any("Operations on the CPU" in caption for caption in tables) is is_told
        assert (found.mfu is not None) is (roofline(found) is not None) is is_told


def test_no_window_is_taken_by_a_torch_that_cannot_record_the_devices_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activities = {torch.profiler.ProfilerActivity.CPU}
    asked = []
    monkeypatch.setattr(
        torch._C._autograd, "_supported_activities", lambda: asked.append(None) or activities
    )
    assert not deep_window_profiler.why_not(), "on a CPU it needs none"
    assert not asked, "the answer asks the driver how many devices there are, which the script may do first"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "records no kernels" in deep_window_profiler.why_not()
    activities.add(torch.profiler.ProfilerActivity.CUDA)
    assert not deep_window_profiler.why_not()


def test_the_report_names_the_line_that_waits() -> None:
    counted = Counted(
        work=(),
        lines=(Sync(what="aten::item", count=1, blocked_ns=7_000, file="/a/train.py", line=9),),
    )
    trace = Trace(
        num_kernels=2,
        span_ns=2_000_000,
        classes=(ClassTime(work=WorkClass.MATRIX, count=2, total_ns=9),),
        syncs=(Sync(what="cudaStreamSynchronize", count=2, blocked_ns=8_000),),
    )
    made = DeepWindowSection().blocks(replace(profile(), deep_window=window(trace=trace, counted=counted)))
    cells = [row.cells for row in getattr(made[-1], "rows", ())]
    assert ("cudaStreamSynchronize", "", "1", "4.0 us") in cells
    assert any(cell[1].endswith("train.py:9") for cell in cells)


# -- the parts


def test_a_trace_too_large_is_cut_after_an_event_and_stays_one(tmp_path: Path) -> None:
    whole = {
        "traceEvents": [
            {
                "ph": "X",
                "cat": "kernel",
                "name": f"k{zlib.crc32(bytes([i % 251, i // 251]))}",
                "ts": i,
                "dur": 1,
            }
            for i in range(3000)
        ]
    }
    source, target = tmp_path / "t.json", tmp_path / "t.json.gz"
    source.write_text(json.dumps(whole, indent=2).replace("    },", "  },").replace("    }\n", "  }\n"))
    assert pack(source, target) is False
    full = target.stat().st_size
    assert json.loads(gzip.decompress(target.read_bytes()))["traceEvents"][-1]["ts"] == 2999
    assert pack(source, target, max_bytes=full // 2) is True
    assert target.stat().st_size <= full // 2
    cut = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert 100 < len(cut) < 3000
    trace = read_trace(target)
    assert trace.num_kernels == len(cut) and not trace.damaged


def test_counting_passes_everything_on_and_stops_where_it_does_not_understand() -> None:
    mode = Counting(lambda: False, lambda name, inside: WorkClass.OTHER)
    with mode:
        product = torch.ones(3, 4) @ torch.ones(4, 5)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(3, 4) @ torch.ones(3, 4)
        mode._work_of = lambda name, inside: {}[name]  # type: ignore[assignment,misc,return-value]
        assert torch.equal(product + 0, product)
    assert mode.broken.startswith("aten.") and not mode.on
    assert sum(each["flops"] for each in mode.as_json()["work"]) == 2 * 3 * 4 * 5


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's operation is the example")
def test_counting_names_the_first_operation_whose_products_have_no_formula() -> None:
    mode = Counting(lambda: False, lambda name, inside: WorkClass.MATRIX)
    with mode:
        torch.nn.Linear(4, 4)(torch.ones(3, 4))
        assert mode.as_json()["unknown"] == ""
        torch.nn.LSTM(4, 4)(torch.ones(3, 2, 4))
    assert mode.as_json()["unknown"] == "aten::mkldnn_rnn_layer"


@pytest.mark.parametrize(
    "capability, hip, products, convolutions",
    [
        ([8, 0], False, "float32", "tf32"),
        ([7, 5], False, "float32", "float32"),
        ([9, 4], True, "float32", "float32"),
    ],
)
def test_float32_is_tf32_where_the_device_takes_it_for_products_of_that_kind(
    monkeypatch: pytest.MonkeyPatch, capability: list[int], hip: bool, products: str, convolutions: str
) -> None:
    settings = {"capability": capability, "hip": hip, "tf32": False, "cudnn_tf32": True}
    asked: list[int] = []

    def device_now(index: int) -> dict[str, Any]:
        asked.append(index)
        return settings

    monkeypatch.setattr("diagnose.launch.deep_window_count.device_now", device_now)
    convolve: Callable[..., Any] = torch.nn.functional.conv2d
    for call, shapes, told in (
        (torch.mm, ((8, 8), (8, 8)), products),
        (convolve, ((1, 3, 8, 8), (4, 3, 3, 3)), convolutions),
    ):
        mode = Counting(lambda: False, lambda name, inside: WorkClass.MATRIX)
        with FakeTensorMode():
            tensors = [torch.empty(shape, device="cuda:1") for shape in shapes]
            with mode:
                call(*tensors)
        assert (mode.as_json()["dtype"], mode.broken, asked.pop()) == (told, "", 1)


def test_a_mode_under_one_of_the_scripts_waits_for_it_to_go() -> None:
    ours, theirs = (Counting(lambda: False, lambda name, inside: WorkClass.OTHER) for _ in range(2))
    ours.__enter__()  # type: ignore[no-untyped-call]
    theirs.__enter__()  # type: ignore[no-untyped-call]
    assert not ours.leave()
    assert theirs.leave() and ours.leave() and not ours.leave()


@pytest.mark.parametrize("text", ["10", "0", "10:5", "auto"])
def test_the_option_takes_a_step_and_a_count(tmp_path: Path, text: str) -> None:
    assert resolve({"deep_window": text}, {}, tmp_path).deep_window == text
    assert resolve({}, {"DIAGNOSE_DEEP_WINDOW": text}, tmp_path).deep_window == text


@pytest.mark.parametrize("text", ["10:0", "10:6", "-1", "often", "1:2:3", "1e3"])
def test_the_option_refuses_what_is_neither(tmp_path: Path, text: str) -> None:
    with pytest.raises(DiagnoseError, match="--deep-window: must be STEP, STEP:COUNT"):
        resolve({"deep_window": text}, {}, tmp_path)


def test_no_thread_of_ours_is_left() -> None:
    assert not [each for each in threading.enumerate() if each.name == "diagnose-deep-window"]


def test_where_kinetos_level_is_hidden_it_is_silent_all_the_same(tmp_path: Path) -> None:
    """It takes the variable when it is first used; a window is not refused for that."""
    script = (
        "import os, torch\n"
        "from diagnose.launch import deep_window_profiler as found\n"
        "level, found.SEVERITY = found._severity(), 'hidden'\n"
        "assert not found.why_not()\n"
        "profiler = found.Profiler()\n"
        "profiler.prepare()\n"
        "profiler.start()\n"
        "profiler.stop()\n"
        "assert level is None or level.value == found.NOTHING_IS_SO_SEVERE\n"
        "assert found.LEVEL not in os.environ and not found.why_not()\n"
    )
    ended = run(sys.executable, "-c", script, cwd=tmp_path)
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")
