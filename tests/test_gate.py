"""From `git commit` to exit code, with a stand-in for the training."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diagnose.cli._gate import share, training_command
from diagnose.cli.main import add_command
from diagnose.core.errors import DiagnoseError
from diagnose.gate import bisect, compare_commits, update
from diagnose.gate.measure import RunPlan
from diagnose.gate.pairs import Asked
from diagnose.gate.result import GateResult, Reason, Side, TrainingFailed, Verdict
from tests.gates import WILD, check_junit, commit, git, measured_stand_in, repository, stand_in
from tests.running import run

DIAGNOSE = (sys.executable, "-m", "diagnose")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The command line with the stand-in for the training; returns what click saw."""
    real = compare_commits.Plumbing
    monkeypatch.setattr(compare_commits, "Plumbing", partial(real, measure=measured_stand_in))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    app = typer.Typer()
    for verb in ("gate", "baseline", "bisect"):
        add_command(app, verb)

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


def test_a_loss_in_rare_steps_alone_does_not_pass(gate: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(stand_in(10))
    (tmp_path / "new.py").write_text(stand_in(10, stall=0.1))
    call = ("gate", "--base-cmd", "old.py", "--head-cmd", "new.py")
    ended = gate(*call)
    assert ended.exit_code == 1
    assert ended.stdout.startswith("REGRESSION: samples/s with every stall is ")
    assert "the loss is in rare ones" in " ".join(ended.stdout.split())
    assert gate(*call, "--metric", "step_ms").exit_code == 0, "who asks for one thing is told of that"


def test_a_certain_loss_with_every_stall_does_not_pass_where_usual_steps_scatter(
    gate: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "old.py").write_text(stand_in(10, scatter=0.1))
    (tmp_path / "new.py").write_text(stand_in(10, scatter=0.1, stall=1.0))
    call = ("gate", "--base-cmd", "old.py", "--head-cmd", "new.py")
    ended = gate(*call, "--inconclusive", "pass")
    assert ended.exit_code == 1
    assert ended.stdout.startswith("REGRESSION: samples/s with every stall is ")
    assert "of a usual step it cannot be told" in " ".join(ended.stdout.split())
    assert gate(*call, "--metric", "step_ms").exit_code == 3


def test_what_cannot_be_told_passes_or_fails_only_when_asked_to(
    gate: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(stand_in(10, scatter=WILD))
    call = ("gate", "--base-cmd", "a.py", "--head-cmd", "a.py")
    assert gate(*call, "--inconclusive", "pass", "--json", "out.json").exit_code == 0
    answer = json.loads((tmp_path / "out.json").read_text())
    assert (answer["verdict"], answer["exit_code"]) == ("inconclusive", 0)
    assert gate(*call, "--inconclusive", "fail").exit_code == 1
    ended = gate(*call)
    assert ended.exit_code == 3
    assert ended.stdout.startswith("CANNOT TELL")
    assert "to do:" in ended.stdout


def test_a_gate_in_a_folder_of_the_repository_runs_there(gate: Callable[..., Any], tmp_path: Path) -> None:
    repository(tmp_path)
    commit(tmp_path, stand_in(10), path="jobs/train.py")
    commit(tmp_path, stand_in(13), path="jobs/train.py")
    call = ("gate", "--ab", "main~1..main", "--gitlab", "issues.json", "--", "train.py")
    assert gate(*call, cwd=tmp_path / "jobs").exit_code == 1
    issues = json.loads((tmp_path / "jobs" / "issues.json").read_text())
    assert issues[0]["location"]["path"] == "jobs/train.py", "GitLab reads paths in the repository"


def test_uncommitted_changes_are_not_measured_and_that_is_said(
    gate: Callable[..., Any], tmp_path: Path
) -> None:
    repository(tmp_path, stand_in(10), stand_in(10))
    (tmp_path / "train.py").write_text(stand_in(20))
    ended = gate("gate", "--ab", "HEAD~1..HEAD", "--", "train.py")
    assert ended.exit_code == 0
    assert "not committed: the gate measures commits" in " ".join(ended.stdout.split())
    assert (tmp_path / "train.py").read_text() == stand_in(20)


@pytest.mark.parametrize(
    "module, name, call",
    [
        (compare_commits, "compare_versions", ("gate", "--base-cmd", "a.py", "--head-cmd", "a.py")),
        (update, "record_job", ("baseline", "update", "--branch", "main", "--", "a.py")),
        (bisect, "bisect", ("bisect", "a..b", "--", "a.py")),
    ],
    ids=["gate", "baseline", "bisect"],
)
def test_a_fault_of_ours_does_not_exit_as_a_regression(
    gate: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    call: tuple[str, ...],
) -> None:
    monkeypatch.setattr(module, name, lambda *_, **__: [][0])
    ended = gate(*call)
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
        (["--base-cmd", "a.py", "--head-cmd", "b.py", "--link", "data"], "for the worktrees of --ab"),
        (["--ab", "HEAD..HEAD", "--allow-machine-mismatch", "--", "train.py"], "is for --baseline"),
        (["--base-cmd", "a.py", "--", "train.py"], "go together"),
        (["--base-cmd", "a.py 'x", "--head-cmd", "a.py"], '--base-cmd "a.py \'x" cannot be read'),
        (["--ab", "HEAD..HEAD", "--junit", "no/such/x.xml", "--", "train.py"], "there is no folder"),
        (["--ab", "HEAD..HEAD", "--junit", ".", "--", "train.py"], "it is a folder"),
        (["--ab", "HEAD..HEAD", "--", "torchrun", "--nproc-per-node", "2", "train.py"], "is a launcher"),
        (["--base-cmd", "N=1 python a.py", "--head-cmd", "b.py"], "set variables in front of diagnose"),
        (["--baseline", "b", "--metric", "instructions", "--", "train.py"], "is for two versions"),
        (["--ab", "HEAD..HEAD", "--", "train.py", "--config={here}/train.py"], "names the working copy"),
        (["--ab", "HEAD..HEAD", "--", "--steps", "3"], "--steps stands where the script should"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_call_says_what_is_wrong_before_anything_runs(
    gate: Callable[..., Any], tmp_path: Path, arguments: list[str], words: str
) -> None:
    repository(tmp_path, stand_in(10))
    ended = gate("gate", *(word.replace("{here}", str(tmp_path)) for word in arguments))
    assert isinstance(ended.exception, DiagnoseError)
    assert words in str(ended.exception)
    assert git(tmp_path, "worktree", "list").count("\n") == 0


def test_a_path_into_the_working_copy_may_name_data(gate: Callable[..., Any], tmp_path: Path) -> None:
    repository(tmp_path, stand_in(10))
    (tmp_path / "data").mkdir()
    ended = gate(
        "gate", "--ab", "HEAD..HEAD", "--", "train.py", f"--data={tmp_path}/data", f"--top={tmp_path}"
    )
    assert ended.exit_code == 0, ended.output


def test_an_output_that_cannot_be_written_costs_neither_the_verdict_nor_the_others(
    gate: Callable[..., Any], tmp_path: Path
) -> None:
    repository(tmp_path, stand_in(10), stand_in(12))
    (tmp_path / "full").symlink_to("/dev/full")
    ended = gate(
        *("gate", "--ab", "HEAD~1..HEAD", "--json", "full", "--junit", "j.xml"),
        *("--gitlab", "g.json", "--", "train.py"),
    )
    assert ended.exit_code == 1, "a regression"
    assert "cannot write full" in ended.output
    check_junit((tmp_path / "j.xml").read_text())
    assert json.loads((tmp_path / "g.json").read_text())


def test_a_head_that_does_not_train_fails(gate: Callable[..., Any], tmp_path: Path) -> None:
    repository(tmp_path, stand_in(10), "pass\n")
    ended = gate("gate", "--ab", "HEAD~1..HEAD", "--inconclusive", "pass", "--", "train.py")
    assert ended.exit_code == 5, ended.output
    assert "no optimizer step was seen in head-00, where base-00 did" in " ".join(ended.stdout.split())


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
    assert training_command(["python3", "train.py", "-x"]) == ("train.py", "-x")
    assert training_command([sys.executable, "-m", "jobs.train"]) == ("-m", "jobs.train")
    assert training_command(["train.py"]) == ("train.py",)


# -- under GitHub


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


def test_github_obeys_nothing_that_a_script_wrote(gate: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("raise SystemExit('::error::x\\n::add-mask::y')")
    os.environ["GITHUB_ACTIONS"] = "true"  # the fixture has taken it away, and gives it back
    first, *lines = gate("gate", "--base-cmd", "old.py", "--head-cmd", "old.py").stdout.splitlines()
    stop, token = first.rsplit("::", 1)
    assert (stop, len(token)) == ("::stop-commands", 32)
    end = lines.index(f"::{token}::")
    assert {"::error::x", "::add-mask::y"} <= {line.strip() for line in lines[:end]}
    assert [line[:7] for line in lines[end + 1 :]] == ["::error"]


def test_a_stand_in_fails_as_a_training_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(stand_in(1, exit_code=2))
    side = Side(label="base", name="x", root=tmp_path, command=("train.py",))
    with pytest.raises(TrainingFailed):
        measured_stand_in(side, "base-01", tmp_path, RunPlan())
