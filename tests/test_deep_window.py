"""Deep windows of real jobs on the CPU: what they record, and that the script is none the wiser."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import diagnose
from diagnose.analysis.profile import load_profile, load_series
from diagnose.core.deep_window import WorkClass
from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import Profile
from diagnose.hooks._curious import settle
from diagnose.hooks._recorder import Recorder
from diagnose.launch import deep_window, deep_window_under_way
from diagnose.launch.settings import resolve
from diagnose.report import to_json
from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, PLAIN, REPOSITORY, SCRIPTS, Ended, comes_true, run

pytest_plugins = ("tests.compiled",)
pytestmark = pytest.mark.usefixtures("nothing_is_compiled")

SCRIPT = SCRIPTS / "windowed.py"


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


@pytest.mark.extended
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
    is_off = comes_true(lambda: not torch._C._autograd._profiler_enabled(), within_s=60)
    assert is_off, "while an evaluation runs, say"
    diagnose.detach()
    log = read_rank(tmp_path / "r" / "rank0.sqlite")
    told = [(d["state"], d.get("reason")) for _, _, kind, d in log.events if kind == "deep-window"]
    assert told == [("begun", None), ("undone", "no step ended for long")]


def told(recorder: Recorder) -> list[tuple[str, Any]]:
    return [(detail["state"], detail.get("reason")) for *_, detail in recorder.events]


# -- the option, and what is left when all is over


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


def test_once_a_window_is_over_the_hooks_may_look_away_at_once(tmp_path: Path) -> None:
    recorder = Recorder()
    windows = deep_window.DeepWindows(recorder, tmp_path, "3:2")
    assert recorder.on_boundary is not None
    recorder.curious, recorder.steps = False, 64
    settle(recorder)
    assert recorder.calm_when_told == 0
    windows._watch_no_more()
    assert recorder.calm_when_told == recorder.thread
