"""What a deep window undoes when it ends, what is waited for, and who may not take one."""

from __future__ import annotations

import gzip
import json
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diagnose.core.deep_window import OURS
from diagnose.hooks._recorder import Recorder
from diagnose.launch import deep_window, deep_window_profiler, deep_window_under_way
from diagnose.launch.deep_window_count import Counting
from diagnose.launch.deep_window_profiler import Profiler

pytest_plugins = ("tests.compiled",)
pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


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
