"""From `git commit` to exit code: worktrees, pairs, verdicts, and every form in which they are told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from diagnose.cli import baseline as baseline_verb
from diagnose.cli import gate as gate_verb
from diagnose.cli._gate import share, training_command
from diagnose.core.errors import DiagnoseError
from diagnose.gate import as_github, compare_commits, instructions
from diagnose.gate.as_gitlab import to_gitlab
from diagnose.gate.as_json import to_json
from diagnose.gate.as_junit import to_junit
from diagnose.gate.as_text import gate_text
from diagnose.gate.measure import OutOfTime, RunPlan, measured_run
from diagnose.gate.noise import causes
from diagnose.gate.pairs import Asked, run_pairs
from diagnose.gate.result import (
    Failure,
    GateResult,
    MachineState,
    MeasuredRun,
    Metric,
    Reason,
    Side,
    TrainingFailed,
    Verdict,
)
from diagnose.gate.worktrees import moved_path, parse_range, resolve_range, uncommitted, worktrees
from diagnose.report import Terminal
from tests.gates import WILD, commit, git, measured_stand_in, repository, stand_in
from tests.running import environment, has_ended, run

DIAGNOSE = (sys.executable, "-m", "diagnose")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The command line with the stand-in for the training; returns what click saw."""
    real = compare_commits.Plumbing
    monkeypatch.setattr(compare_commits, "Plumbing", partial(real, measure=measured_stand_in))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    app = typer.Typer()
    gate_verb.command(app)
    baseline_verb.command(app)

    def call(*arguments: object, cwd: Path | None = None) -> Any:
        monkeypatch.chdir(cwd or tmp_path)
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


# -- the whole of it


@pytest.mark.parametrize(
    "before, after, code, verdict",
    [
        (stand_in(10), stand_in(10.05), 0, "pass"),
        (stand_in(10), stand_in(8), 0, "pass"),
        (stand_in(10), stand_in(10.6), 1, "regression"),
        (stand_in(10, scatter=WILD), stand_in(10.6, scatter=WILD), 3, "inconclusive"),
        (stand_in(10), stand_in(10, exit_code=9), 5, "failed"),
    ],
    ids=["same", "faster", "slower", "wild", "fails"],
)
def test_two_commits_to_an_exit_code(
    gate: Callable[..., Any], tmp_path: Path, before: str, after: str, code: int, verdict: str
) -> None:
    repository(tmp_path, before, after)
    ended = gate("gate", "--ab", "HEAD~1..HEAD", "--json", "out.json", "--junit", "j.xml", "--", "train.py")
    assert ended.exit_code == code, ended.output
    answer = json.loads((tmp_path / "out.json").read_text())
    assert (answer["schema"], answer["verdict"], answer["exit_code"]) == (1, verdict, code)
    check_junit((tmp_path / "j.xml").read_text())
    assert git(tmp_path, "worktree", "list").count("\n") == 0
    if verdict == "regression":
        assert answer["drop"] == pytest.approx(1 - 10 / 10.6, abs=0.005)
        assert answer["drop_ci95"][0] > 0.03
        assert [side["commit"] for side in answer["sides"]] == [
            git(tmp_path, "rev-parse", "HEAD~1"),
            git(tmp_path, "rev-parse", "HEAD"),
        ]
    if verdict == "failed":
        assert answer["failure"]["exit_code"] == 9
        assert "no such file: data.bin" in ended.output


def test_runs_alternate_so_that_a_drift_favours_neither(gate: Callable[..., Any], tmp_path: Path) -> None:
    repository(tmp_path, stand_in(10), stand_in(10))
    gate("gate", "--ab", "HEAD~1..HEAD", "--json", "out.json", "--", "python", "train.py")
    names = [run["name"] for run in json.loads((tmp_path / "out.json").read_text())["runs"]]
    assert names[:6] == ["base-00", "head-00", "base-01", "head-01", "head-02", "base-02"]
    assert len(names) == 2 + 2 * 7


def test_a_repository_may_have_any_name_and_any_hooks(gate: Callable[..., Any], tmp_path: Path) -> None:
    odd = repository(tmp_path / "dépôt 'x' $(touch oops) ; \"", stand_in(10), stand_in(12))
    hook = odd / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch hooked; exit 1\n")
    hook.chmod(0o755)
    assert gate("gate", "--ab", "HEAD~1..HEAD", "--", "train.py", cwd=odd).exit_code == 1
    assert git(odd, "worktree", "list").count("\n") == 0
    assert not list(tmp_path.rglob("oops"))
    assert not list(tmp_path.rglob("hooked"))


def test_reasons_that_cannot_be_found_do_not_cost_the_verdict(tmp_path: Path) -> None:
    for name, step_ms in (("old.py", 10), ("new.py", 12)):
        (tmp_path / name).write_text(stand_in(step_ms))
    request = compare_commits.GateRequest(
        asked=Asked(), commands=(("old.py",), ("new.py",)), cwd=tmp_path, folder=tmp_path / "runs"
    )

    def explain(found: GateResult) -> tuple[Reason, ...]:
        raise KeyError("a bug")

    plumbing = compare_commits.Plumbing(measure=measured_stand_in, explain=explain)
    found = compare_commits.compare_versions(request, plumbing)
    assert found.verdict is Verdict.REGRESSION
    assert found.notes[0].startswith("the loss could not be attributed, a bug of ours: KeyError")


def test_two_commands_are_compared_without_git(gate: Callable[..., Any], tmp_path: Path) -> None:
    for name, step_ms in (("old.py", 10), ("new.py", 12)):
        (tmp_path / name).write_text(stand_in(step_ms))
    assert gate("gate", "--base-cmd", "python old.py", "--head-cmd", "python new.py").exit_code == 1
    assert gate("gate", "--base-cmd", "new.py", "--head-cmd", "old.py").exit_code == 0
    assert gate("gate", "--base-cmd", "old.py", "--head-cmd", "new.py", "--max-drop", "25%").exit_code == 0


def test_what_cannot_be_told_passes_or_fails_only_when_asked_to(
    gate: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(stand_in(10, scatter=WILD))
    call = ("gate", "--base-cmd", "a.py", "--head-cmd", "a.py")
    assert gate(*call, "--inconclusive", "pass").exit_code == 0
    assert gate(*call, "--inconclusive", "fail").exit_code == 1
    ended = gate(*call)
    assert ended.exit_code == 3
    assert ended.stdout.startswith("CANNOT TELL")
    assert "to do:" in ended.stdout


def test_a_gate_in_a_folder_of_the_repository_runs_there(gate: Callable[..., Any], tmp_path: Path) -> None:
    repository(tmp_path)
    commit(tmp_path, stand_in(10), path="jobs/train.py")
    commit(tmp_path, stand_in(13), path="jobs/train.py")
    assert gate("gate", "--ab", "main~1..main", "--", "train.py", cwd=tmp_path / "jobs").exit_code == 1


def test_uncommitted_changes_are_not_measured_and_that_is_said(
    gate: Callable[..., Any], tmp_path: Path
) -> None:
    repository(tmp_path, stand_in(10), stand_in(10))
    (tmp_path / "train.py").write_text(stand_in(20))
    ended = gate("gate", "--ab", "HEAD~1..HEAD", "--", "train.py")
    assert ended.exit_code == 0
    assert "not committed: the gate measures commits" in " ".join(ended.stdout.split())
    assert (tmp_path / "train.py").read_text() == stand_in(20)


def test_a_fault_of_ours_does_not_exit_as_a_regression(
    gate: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(stand_in(10))
    monkeypatch.setattr(compare_commits, "compare_versions", lambda *_: [][0])
    ended = gate("gate", "--base-cmd", "a.py", "--head-cmd", "a.py")
    assert ended.exit_code == 70
    assert "IndexError" in ended.output


# -- its options


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train.py"], "say what to compare with"),
        (["--ab", "HEAD~1..HEAD"], "no training command"),
        (["--ab", "nowhere..HEAD", "--", "train.py"], "there is no commit 'nowhere'"),
        (["--ab", "HEAD", "--", "train.py"], "takes two commits"),
        (["--ab", "HEAD..HEAD", "--max-drop", "3", "--", "train.py"], "such as 3%"),
        (["--ab", "HEAD..HEAD", "--metric", "speed", "--", "train.py"], "There are: samples_per_s"),
        (["--ab", "HEAD..HEAD", "--inconclusive", "maybe", "--", "train.py"], "pass or fail"),
        (["--ab", "HEAD..HEAD", "--link", "data", "--", "train.py"], "no such path"),
        (["--ab", "HEAD..HEAD", "--link", "/etc", "--", "train.py"], "no such path"),
        (["--base-cmd", "a.py", "--", "train.py"], "go together"),
        (["--base-cmd", "a.py 'x", "--head-cmd", "a.py"], '--base-cmd "a.py \'x" cannot be read'),
        (["--ab", "HEAD..HEAD", "--junit", "no/such/x.xml", "--", "train.py"], "there is no folder"),
        (["--ab", "HEAD..HEAD", "--", "--steps", "3"], "--steps stands where the script should"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_call_says_what_is_wrong_before_anything_runs(
    gate: Callable[..., Any], tmp_path: Path, arguments: list[str], words: str
) -> None:
    repository(tmp_path, stand_in(10))
    ended = gate("gate", *arguments)
    assert isinstance(ended.exception, DiagnoseError)
    assert words in str(ended.exception)
    assert git(tmp_path, "worktree", "list").count("\n") == 0


def test_the_command_line_exits_two_for_a_wrong_call_and_lists_its_codes(tmp_path: Path) -> None:
    wrong = run(*DIAGNOSE, "gate", "--ab", "a..b", "--", "train.py", cwd=tmp_path)
    assert wrong.code == 2
    assert "Traceback" not in wrong.stderr
    shown = " ".join(run(*DIAGNOSE, "gate", "--help", cwd=tmp_path).stdout.split())
    for words in (
        "0 pass",
        "1 regression",
        "2 wrong call",
        "3 cannot tell",
        "4 no baseline",
        "5 the training",
    ):
        assert words in shown


def test_a_dry_run_names_the_commits_and_runs_nothing(tmp_path: Path) -> None:
    repository(tmp_path, "raise SystemExit('it ran')", "raise SystemExit('it ran')")
    ended = run(
        *DIAGNOSE, "gate", "--dry-run", "--ab", "main~1..main", "--", "train.py", "-x", cwd=tmp_path
    )
    hashes = [git(tmp_path, "rev-parse", name)[:12] for name in ("main~1", "main")]
    assert ended.code == 0
    assert ended.stdout == (
        f"base: main~1 ({hashes[0]}) in a worktree of its own\n"
        f"head: main ({hashes[1]}) in a worktree of its own\n"
        "7 to 20 pairs of runs in the order base, head, head, base\n"
        "command: train.py -x\n"
        "fails where samples/s is more than 3.0 % worse\n"
    )
    assert not (tmp_path / ".diagnose").exists()


def test_shares_are_percentages_or_parts() -> None:
    assert share("3%") == share("0.03") == share(" 3 %")
    for text in ("3", "0", "-1%", "100%", "three"):
        with pytest.raises(DiagnoseError):
            share(text)


def test_a_training_command_may_begin_with_python() -> None:
    assert training_command(["python3.11", "train.py", "-x"]) == ("train.py", "-x")
    assert training_command(["/usr/bin/python", "-m", "jobs.train"]) == ("-m", "jobs.train")
    assert training_command(["train.py"]) == ("train.py",)


# -- real runs of commands that end soon


def test_a_real_command_that_fails_is_shown_with_the_end_of_its_stderr(tmp_path: Path) -> None:
    script = "import sys; print('Schöne Grüße: it broke', file=sys.stderr); sys.exit(7)"
    (tmp_path / "a.py").write_text(script)
    command = ("gate", "--base-cmd", "a.py", "--head-cmd", "a.py", "--json", "-")
    ended = run(*DIAGNOSE, *command, cwd=tmp_path)
    assert ended.code == 5
    answer = json.loads(ended.stdout)
    assert answer["failure"]["exit_code"] == 7
    assert answer["failure"]["last_lines"] == ["Schöne Grüße: it broke"]
    assert "THE TRAINING COMMAND FAILED: base-00 ended with exit code 7" in ended.stderr


def test_a_command_that_never_trains_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('hello')")
    ended = run(*DIAGNOSE, "gate", "--base-cmd", "a.py", "--head-cmd", "a.py", cwd=tmp_path)
    assert ended.code == 3
    assert "no optimizer step was seen" in ended.stdout
    assert "diagnose.step()" in ended.stdout


def sleeping_gate(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a gate whose training sleeps; returns it, and the training's process, once that one runs."""
    mark = folder / "pid.txt"
    text = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    repository(folder, text, text)
    process = subprocess.Popen(
        [*DIAGNOSE, "gate", "--ab", "main~1..main", "--", "train.py"],
        cwd=folder,
        env=environment(TMPDIR=str(folder)),
        stderr=subprocess.DEVNULL,
    )
    for _ in range(600):
        if mark.exists() and mark.read_text():
            return process, int(mark.read_text())
        time.sleep(0.05)
    raise AssertionError("the training never began")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_a_gate_that_is_ended_leaves_no_process_and_no_worktree(tmp_path: Path, number: int) -> None:
    process, training = sleeping_gate(tmp_path)
    assert git(tmp_path, "worktree", "list").count("\n") == 2
    process.send_signal(number)
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert process.wait(timeout=30) == codes[signal.Signals(number)]
    assert has_ended(training, within_s=20)
    for _ in range(400):
        if git(tmp_path, "worktree", "list").count("\n") == 0 and not list(
            tmp_path.glob("diagnose-gate-*")
        ):
            return
        time.sleep(0.05)
    raise AssertionError(git(tmp_path, "worktree", "list"))


def test_two_gates_at_once_do_not_meet(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.getcwd(), file=sys.stderr); time.sleep(1); sys.exit(3)"
    repository(tmp_path, script, script)
    command = [*DIAGNOSE, "gate", "--ab", "main~1..main", "--json", "-", "--", "train.py"]
    both = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert [process.returncode for process in both] == [5, 5]
    assert answers[0]["folder"] != answers[1]["folder"]
    assert answers[0]["failure"]["last_lines"] != answers[1]["failure"]["last_lines"], "the same worktree"
    assert git(tmp_path, "worktree", "list").count("\n") == 0


def test_a_run_that_is_out_of_time_is_ended(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import time; time.sleep(60)")
    side = Side(label="base", name="a", root=tmp_path, command=("a.py",))
    begun = time.monotonic()
    with pytest.raises(OutOfTime):
        measured_run(side, "base-00", tmp_path / "runs", RunPlan(timeout_s=1.0))
    assert time.monotonic() - begun < 30


TRAINING = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(1600, 64))
for epoch in range(1000):
    for (x,) in torch.utils.data.DataLoader(data, 16):
        {work}
        optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
"""


def test_a_real_run_has_every_figure(tmp_path: Path) -> None:
    """In a folder with modules that bear our names, which must not be taken for ours."""
    (tmp_path / "diagnose.py").write_text("raise SystemExit('the wrong diagnose')")
    (tmp_path / "train.py").write_text(TRAINING.format(work="__import__('time').sleep(0.004)"))
    side = Side(label="head", name="a", root=tmp_path, command=("train.py",))
    measured = measured_run(side, "head-00", tmp_path / "runs", RunPlan(steps=600, finds_warmup=True))
    figures = measured.figures
    assert set(figures) >= {
        Metric.SAMPLES_PER_S,
        Metric.MEAN_SAMPLES_PER_S,
        Metric.STEP_MS,
        Metric.CPU_MS,
        Metric.PEAK_MEMORY,
        Metric.STARTUP,
    }
    assert figures[Metric.SAMPLES_PER_S] == pytest.approx(16_000 / figures[Metric.STEP_MS], rel=0.01)
    assert figures[Metric.STEP_MS] > 4
    assert figures[Metric.CPU_MS] > 0
    assert 50e6 < figures[Metric.PEAK_MEMORY] < 50e9
    assert 0 < figures[Metric.STARTUP] < measured.wall_s
    assert measured.warmup >= 20
    assert measured.num_steps + measured.warmup == 620


@pytest.mark.extended
def test_two_real_commits_to_an_exit_code(tmp_path: Path) -> None:
    repository(
        tmp_path,
        TRAINING.format(work="pass"),
        TRAINING.format(work="torch.randn(400, 400) @ x.new_ones(400, 400)"),
    )
    call = ("gate", "--steps", "60", "--ab", "main~1..main", "--json", "out.json", "--", "train.py")
    ended = subprocess.run(
        [*DIAGNOSE, *call], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=1200
    )
    assert ended.returncode == 1, ended.stdout
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["drop"] > 0.2
    assert "train.py" in {reason["file"] for reason in answer["why"]}


# -- pairs and plans


def scripted(figures: dict[str, float], *, wall_s: float = 1.0, steps: int = 200) -> Any:
    """A measuring function that knows what each side's step takes, and notes the plans it was given."""
    plans: list[RunPlan] = []

    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        plans.append(plan)
        step_ms = figures[name.partition("-")[0]]
        return MeasuredRun(
            name=name,
            folder=Path(name),
            root=Path(),
            figures={Metric.STEP_MS: step_ms, Metric.STARTUP: 1.0},
            num_steps=steps,
            warmup=30,
            step_s=step_ms / 1000,
            startup_s=1.0,
            wall_s=wall_s,
        )

    measure.plans = plans  # type: ignore[attr-defined]
    return measure


def test_without_a_batch_size_the_step_time_is_judged() -> None:
    paired = run_pairs(scripted({"base": 10, "head": 11}), Asked())
    assert paired.judgement.metric is Metric.STEP_MS
    assert paired.judgement.verdict is Verdict.REGRESSION
    assert paired.judgement.drop == pytest.approx(0.1)


def test_all_runs_that_count_measure_the_same_steps_after_the_same_warm_up() -> None:
    measure = scripted({"base": 10, "head": 10})
    run_pairs(measure, Asked())
    assert {plan.finds_warmup for plan in measure.plans[:2]} == {True}
    counted = {(plan.steps, plan.warmup, plan.finds_warmup) for plan in measure.plans[2:]}
    assert counted == {(300, 30, False)}, "3 s of steps of 10 ms"


def test_a_budget_shortens_the_runs_and_then_ends_them() -> None:
    now = [0.0]
    measure = scripted({"base": 100, "head": 100}, wall_s=5.0)

    def slow(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        now[0] += 5.0
        return measure(side, name, plan)

    paired = run_pairs(slow, Asked(budget_s=60.0), clock=lambda: now[0])
    assert measure.plans[2].steps == 40, "never below what can be judged"
    assert now[0] <= 60.0
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped == "the budget of 1 min was used up by 12 runs"


def test_too_short_a_run_stops_everything() -> None:
    measure = scripted({"base": 10, "head": 10}, steps=5)
    paired = run_pairs(measure, Asked())
    assert len(measure.plans) == 1
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped.startswith("base-00 had 35 steps")


def test_the_causes_of_noise_are_named_with_their_figures() -> None:
    busy = MachineState(load=9.0, cpus=2, foreign_cpus=1.5, stolen_cpus=0.3, throttled_share=0.4)
    runs = [replace(scripted({"base": 10})(0, "base-01", RunPlan()), machine=busy)]
    assert causes(runs) == (
        "other processes used 1.5 CPUs where 2 were ours to use",
        "the machine's host gave 0.30 CPUs to other guests (steal)",
        "the container's CPU quota was used up in 40 % of its periods",
    )
    assert causes([replace(runs[0], machine=MachineState(load=0.5, cpus=2, foreign_cpus=0.1))]) == ()


# -- worktrees


def test_worktrees_hold_the_commits_and_the_links(tmp_path: Path) -> None:
    hashes = [commit(repository(tmp_path / "repo"), text) for text in ("print(1)", "print(2)")]
    (tmp_path / "repo" / "data").mkdir()
    (tmp_path / "repo" / "data" / "big.bin").write_bytes(b"1")
    with worktrees(tmp_path / "repo", hashes, ("data",)) as roots:
        assert [(root / "train.py").read_text() for root in roots] == ["print(1)", "print(2)"]
        assert all((root / "data" / "big.bin").read_bytes() == b"1" for root in roots)
        assert len({len(str(root)) for root in roots}) == 1
    assert not any(root.exists() for root in roots)
    assert (tmp_path / "repo" / "data" / "big.bin").exists(), "a link is removed, not what it points to"


def test_three_dots_compare_with_the_point_where_the_branch_began(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    began = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "checkout", "--quiet", "-b", "topic")
    topic = commit(tmp_path, "print(2)")
    git(tmp_path, "checkout", "--quiet", "main")
    tip = commit(tmp_path, "print(3)")
    assert resolve_range(tmp_path, "main..topic") == (("main", tip), ("topic", topic))
    assert resolve_range(tmp_path, "main...topic") == (("main", began), ("topic", topic))
    assert parse_range("main..") == ("main", "HEAD")


def test_a_commit_that_looks_like_an_option_is_a_name(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    with pytest.raises(DiagnoseError, match="there is no commit '--upload-pack=x'"):
        resolve_range(tmp_path, "--upload-pack=x..HEAD")


def test_import_paths_in_the_repository_move_to_the_worktree(tmp_path: Path) -> None:
    repo, root = tmp_path / "repo", tmp_path / "base"
    path = os.pathsep.join([str(repo / "src"), "/usr/lib/x", ""])
    assert moved_path(path, repo, root) == os.pathsep.join([str(root / "src"), "/usr/lib/x", ""])


def test_a_clean_repository_has_nothing_uncommitted(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    (tmp_path / "new.txt").write_text("untracked")
    assert uncommitted(tmp_path) == ""
    (tmp_path / "train.py").write_text("print(2)")
    assert uncommitted(tmp_path).startswith("1 changed file ")


# -- what it says


HOSTILE = 'a,b:c%0A::error::x\n<img src=x onerror=1>|`"\x1b[31m\x00\udc80.py'
REASONS = (
    Reason(text="forward grew by 3 ms\n::set-output name=x::y", kind="phase", lost_share=0.9),
    Reason(text="new line 100%", kind="line", file=HOSTILE, line=3, lost_share=0.5),
)


def result(verdict: Verdict, **changes: Any) -> GateResult:
    """A result with hostile names wherever a name can stand."""
    paired = run_pairs(scripted({"base": 10, "head": 11}), Asked())
    sides = tuple(
        Side(label=label, name=HOSTILE, commit="0123456789" * 4, root=Path(), command=(HOSTILE,))
        for label in ("base", "head")
    )
    whole = GateResult(
        verdict=verdict,
        metric=Metric.STEP_MS,
        max_drop=0.03,
        sides=sides,
        pairs=paired.pairs,
        runs=paired.runs,
        judgement=paired.judgement,
        folder=Path("/runs"),
        wall_s=12.5,
    )
    return replace(whole, **changes)


FAILED = Failure(run="base-00", reason="exit code 7", exit_code=7, signal=None, last_lines=(HOSTILE, "```"))
ALL = [
    result(Verdict.PASS),
    result(Verdict.REGRESSION, why=REASONS),
    result(Verdict.INCONCLUSIVE, causes=(HOSTILE,), advice="wait", judgement=None),
    result(Verdict.MISMATCH, causes=("cpu: A then, B now",), judgement=None),
    result(Verdict.FAILED, failure=FAILED, judgement=None),
]


def named(each: GateResult) -> str:
    return each.verdict.value


TESTSUITE = {"name", "tests", "failures", "errors", "time", "skipped"}
IN_TESTCASE = ["skipped", "error", "failure", "system-out"]


def check_junit(text: str) -> ElementTree.Element:
    """Holds the file against the schema that Jenkins publishes (jenkins-junit.xsd), written out."""
    root = ElementTree.fromstring(text)
    assert (root.tag, set(root.attrib)) == ("testsuites", TESTSUITE - {"skipped"})
    (suite,) = root
    assert (suite.tag, set(suite.attrib)) == ("testsuite", TESTSUITE)
    assert [child.tag for child in suite] == ["properties", "testcase"]
    assert all(child.tag == "property" and set(child.attrib) == {"name", "value"} for child in suite[0])
    case = suite[1]
    assert set(case.attrib) == {"classname", "name", "time"}
    places = [IN_TESTCASE.index(child.tag) for child in case]
    assert places == sorted(places)
    allowed = {"skipped": {"message"}, "error": {"message", "type"}, "failure": {"message", "type"}}
    assert all(set(child.attrib) <= allowed.get(child.tag, set()) for child in case)
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.attrib[count]) == len(case.findall(kind))
    return case


@pytest.mark.parametrize("each", ALL, ids=named)
def test_junit_fails_only_for_a_regression(each: GateResult) -> None:
    case = check_junit(to_junit(each))
    expected = {
        "regression": "failure",
        "failed": "error",
        "inconclusive": "skipped",
        "mismatch": "skipped",
    }
    kinds = [child.tag for child in case if child.tag != "system-out"]
    assert kinds == ([expected[each.verdict.value]] if each.verdict is not Verdict.PASS else [])


@pytest.mark.parametrize("each", ALL, ids=named)
def test_github_gets_one_command_per_line_and_nothing_else(each: GateResult) -> None:
    level = {"pass": "notice", "regression": "error", "failed": "error"}.get(each.verdict.value, "warning")
    lines = as_github.workflow_commands(each)
    assert all(re.fullmatch(r"::(error|warning|notice) [^\r\n]*::[^\r\n]*", line) for line in lines)
    assert lines[0].startswith(f"::{level} title=diagnose gate::")
    if each.why:
        assert lines[1] == (
            "::warning file=a%2Cb%3Ac%250A%3A%3Aerror%3A%3Ax%0A<img src=x onerror=1>|"
            '`"\x1b[31m\x00\udc80.py,'
            "line=3,title=slower here::new line 100%25"
        )


def test_github_shows_ten_annotations_at_most() -> None:
    many = result(Verdict.REGRESSION, why=REASONS[1:] * 50)
    assert sum(line.startswith("::warning") for line in as_github.workflow_commands(many)) == 10


@pytest.mark.parametrize("each", ALL, ids=named)
def test_the_summary_holds_no_html_and_no_second_table(each: GateResult) -> None:
    text = as_github.summary(each)
    outside, _, _ = text.partition("```")
    assert "<img" not in outside
    assert all(line.count("|") - line.count(r"\|") == 3 for line in outside.splitlines() if line[:1] == "|")


def test_a_summary_is_cut_where_github_would_drop_it(tmp_path: Path) -> None:
    many = result(Verdict.REGRESSION, why=REASONS * 20_000)
    text = as_github.summary(many)
    assert 1_000_000 < len(text.encode("utf-8", "replace")) <= as_github.MOST_BYTES
    assert text.endswith("the rest is in the JSON report\n")
    file = tmp_path / "summary.md"
    file.write_text("an earlier step\n")
    as_github.append_summary(many, file)
    assert file.read_text() == "an earlier step\n", "with it the whole file would be dropped"
    as_github.append_summary(result(Verdict.PASS), file)
    assert file.read_text().startswith("an earlier step\n## diagnose gate: PASS")


@pytest.mark.parametrize("each", ALL, ids=named)
def test_the_terminal_is_told_nothing_to_obey(each: GateResult) -> None:
    text = gate_text(each, Terminal(width=80))
    assert text.startswith(each.verdict.label)
    assert not {"\x1b", "\x00", "\r"} & set(text)
    assert len(text.splitlines()) <= 24 + len(each.why), "one screen"


@pytest.mark.parametrize("each", ALL, ids=named)
def test_json_and_the_code_quality_report_can_be_parsed(each: GateResult) -> None:
    answer = json.loads(json.dumps(to_json(each), allow_nan=False))
    assert answer["exit_code"] == {"pass": 0, "regression": 1, "inconclusive": 3, "mismatch": 4}.get(
        each.verdict.value, 5
    )
    assert set(answer) == set(to_json(ALL[0]))
    issues = json.loads(to_gitlab(each))
    assert all(
        set(issue) == {"description", "check_name", "fingerprint", "severity", "location"}
        for issue in issues
    )
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)
    assert len(issues) == {"pass": 0, "regression": 2, "failed": 0}.get(each.verdict.value, 1)


def test_under_github_the_verdict_goes_to_annotations_and_summary(
    gate: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.py").write_text(stand_in(10))
    (tmp_path / "new.py").write_text(stand_in(12))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    os.environ["GITHUB_ACTIONS"] = "true"  # the fixture has taken it away, and gives it back
    ended = gate("gate", "--base-cmd", "old.py", "--head-cmd", "new.py")
    assert "::error title=diagnose gate::REGRESSION" in ended.output
    assert (tmp_path / "summary.md").read_text().startswith("## diagnose gate: REGRESSION")


# -- instructions


def test_instructions_are_counted_where_perf_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "perf"
    fake.write_text(
        "#!/bin/sh\nout=/dev/stderr\n"
        'while [ $# -gt 0 ]; do case "$1" in\n'
        '-o) out="$2"; shift 2;; --|true) shift; break;; *) shift;; esac; done\n'
        '[ $# -eq 0 ] || "$@"\necho "123456,,instructions:u,99,100.00,," > "$out"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    instructions._perf.cache_clear()
    try:
        counts = tmp_path / "counts.txt"
        command = [*instructions.counting(counts), "touch", str(tmp_path / "made")]
        assert command[0] == str(fake)
        subprocess.run(command, check=True, timeout=30)
        assert (tmp_path / "made").exists()
        assert instructions.count_of(counts) == 123456
        fake.write_text("#!/bin/sh\necho '<not supported>,,instructions:u,0,100.00,,' >&2\n")
        instructions._perf.cache_clear()
        assert instructions.counting(counts) == []
    finally:
        instructions._perf.cache_clear()


def test_a_stand_in_fails_as_a_training_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(stand_in(1, exit_code=2))
    side = Side(label="base", name="x", root=tmp_path, command=("train.py",))
    with pytest.raises(TrainingFailed):
        measured_stand_in(side, "base-01", tmp_path, RunPlan())
