"""The commit of a repository that lost the speed, and those that do not run."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.gate.as_bisect import bisect_text, to_json
from diagnose.gate.bisect import bisect, row_of_commits
from diagnose.gate.bisection import Bisection, Ending
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.result import Failure, MeasuredRun, Metric, Side, TrainingFailed, Verdict
from diagnose.report import Terminal
from tests.gates import bisect_request, git

COSTS = (100, 100, 100, None, 100, 112, 112, 112, None, 112)
"""What a step takes in each commit, in milliseconds; `None` does not run. The sixth lost the speed."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("toy")
    git(top, "init", "-q", "-b", "main")
    for number, cost in enumerate(COSTS):
        script = "raise SystemExit(7)\n" if cost is None else f"print({cost})\n"
        (top / "train.py").write_text(script + f"# {number}\n")
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", f"change {number} \033[31m%s::error")
    return top


def quick_run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
    """Runs the commit's script, without torch: it prints what its steps take, and a little chance."""
    done = subprocess.run(
        [sys.executable, "-S", *side.command], cwd=side.root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = f"{name} exited with {done.returncode}"
        raise TrainingFailed(Failure(run=name, reason=reason, exit_code=7, last_lines=("boom",)))
    step_ms = float(done.stdout) * random.Random(name).gauss(1, 0.01)
    return MeasuredRun(
        name=name,
        folder=folder / name,
        root=side.root,
        figures={Metric.STEP_MS: step_ms},
        num_steps=200,
        warmup=20,
        step_s=step_ms / 1000,
    )


def test_the_slow_commit_of_a_repository_is_found(repository: Path, tmp_path: Path) -> None:
    before = git(repository, "worktree", "list"), git(repository, "status", "--porcelain")
    found = bisect(bisect_request(repository, "main~9..main", tmp_path), measure=quick_run)
    assert found.ending is Ending.FOUND
    (index,) = found.suspects
    assert found.commits[index].subject.startswith("change 5 ")
    assert found.parent is not None
    assert found.parent.verdict is Verdict.REGRESSION
    assert found.parent.drop == pytest.approx(0.12, abs=0.03)
    assert found.why, "without records of steps it says that it cannot tell"
    assert (git(repository, "worktree", "list"), git(repository, "status", "--porcelain")) == before


def test_the_text_obeys_no_commit_message(repository: Path, tmp_path: Path) -> None:
    found = bisect(bisect_request(repository, "main~5..main~4", tmp_path), measure=quick_run)
    text = bisect_text(found, Terminal())
    assert text.startswith("FOUND: ")
    assert "lost the speed (odds 100.0%)" in " ".join(text.split())
    assert "\033" not in text
    assert "\\x1b[31m" in text
    answer = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert answer["suspects"] == [found.commits[0].hash]
    assert (answer["verdict"], answer["exit_code"]) == ("found", 0)


def test_a_commit_that_hangs_is_left_out(repository: Path, tmp_path: Path) -> None:
    def run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        if git(repository, "log", "-1", "--format=%s", side.commit).startswith("change 2 "):
            assert math.isfinite(plan.timeout_s)
            raise OutOfTime
        return quick_run(side, name, folder, plan)

    found = bisect(bisect_request(repository, "main~8..main~4", tmp_path), measure=run)
    assert found.ending is Ending.FOUND
    assert found.odds is not None
    assert 0 in found.odds.skipped
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]


def test_where_none_between_runs_the_ends_are_measured_again_for_the_reasons(
    repository: Path, tmp_path: Path
) -> None:
    """The worktree of the last commit, whose lines the reasons name, was left for those between."""
    asked: list[str] = []

    def run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        asked.append(git(repository, "log", "-1", "--format=%s", side.commit).split()[1])
        return quick_run(
            replace(side, command=("-c", "1/0")) if asked[-1] == "4" else side, name, folder, plan
        )

    found = bisect(bisect_request(repository, "main~7..main~4", tmp_path), measure=run)
    assert found.ending is Ending.FOUND
    assert found.suspects == range(3)
    assert set(asked[-4:]) == {"2", "5"}


def test_a_commit_that_trains_on_other_ranks_is_left_out(repository: Path, tmp_path: Path) -> None:
    def run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        made = quick_run(side, name, folder, plan)
        if git(repository, "log", "-1", "--format=%s", side.commit).split()[1] != "2":
            return made
        figures = {Metric.STEP_MS: 2 * made.figures[Metric.STEP_MS]}
        return replace(made, figures=figures, missing_ranks=(1,))

    found = bisect(bisect_request(repository, "main~8..main~4", tmp_path), measure=run)
    assert found.odds is not None
    assert 0 in found.odds.skipped
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]


def test_a_run_of_an_end_without_the_figure_is_left_out(repository: Path, tmp_path: Path) -> None:
    of_the_end: list[str] = []

    def run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        made = quick_run(side, name, folder, plan)
        step_ms = made.figures[Metric.STEP_MS]
        subject = git(repository, "log", "-1", "--format=%s", side.commit)
        if subject.startswith("change 9 "):
            of_the_end.append(name)
            if len(of_the_end) == 3:
                return made
        return replace(made, figures={Metric.STEP_MS: step_ms, Metric.CPU_MS: step_ms})

    asked = bisect_request(repository, "main~9..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, metric=Metric.CPU_MS))
    found = bisect(asked, measure=run)
    assert len(of_the_end) > 3
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]


def test_without_a_loss_nothing_is_searched(repository: Path, tmp_path: Path) -> None:
    found = bisect(bisect_request(repository, "main~9..main~7", tmp_path), measure=quick_run)
    assert (found.ending, found.odds) == (Ending.NO_LOSS, None)
    assert found.ending.exit_code == 3
    assert "NO LOSS TO SEARCH FOR" in bisect_text(found, Terminal())


def test_a_last_commit_that_does_not_run_is_said_with_its_words(repository: Path, tmp_path: Path) -> None:
    found = bisect(bisect_request(repository, "main~9..main~1", tmp_path), measure=quick_run)
    assert found.ending is Ending.FAILED
    assert "boom" in bisect_text(found, Terminal())


ONCE, FOR_GOOD = 1, 99


def failing(repository: Path, change: int, after: int, times: int) -> Callable[..., MeasuredRun]:
    """Runs of which so many of one commit, after the first few, fail."""
    seen: list[str] = []

    def run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        if git(repository, "log", "-1", "--format=%s", side.commit).startswith(f"change {change} "):
            seen.append(name)
            if after < len(seen) <= after + times:
                reason, lines = f"{name} failed", ("no space left",)
                raise TrainingFailed(Failure(run=name, reason=reason, exit_code=1, last_lines=lines))
        return quick_run(side, name, folder, plan)

    return run


def test_one_run_of_the_first_commit_that_fails_late_is_made_again(
    repository: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    run = failing(repository, 0, 9, ONCE)
    found = bisect(bisect_request(repository, "main~9..main", tmp_path), measure=run, progress=said.append)
    assert any("did not run now" in line for line in said)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]


def test_a_first_commit_that_fails_late_leaves_what_was_measured(repository: Path, tmp_path: Path) -> None:
    found = bisect(
        bisect_request(repository, "main~9..main", tmp_path), measure=failing(repository, 0, 9, FOR_GOOD)
    )
    assert found.ending is Ending.FAILED
    assert found.ends is not None and found.ends.verdict is Verdict.REGRESSION
    assert found.odds is not None and found.odds.num_pairs
    text = bisect_text(found, Terminal())
    assert "no space left" in text and "last against first: " in text and "odds   pairs" in text


def test_a_parent_that_does_not_run_does_not_cost_the_commit_found(
    repository: Path, tmp_path: Path
) -> None:
    said: list[str] = []

    def run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        parent = git(repository, "log", "-1", "--format=%s", side.commit).startswith("change 4 ")
        if parent and any("beside its parent" in line for line in said):
            raise OutOfTime
        return quick_run(side, name, folder, plan)

    found = bisect(bisect_request(repository, "main~9..main", tmp_path), measure=run, progress=said.append)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]
    text = " ".join(bisect_text(found, Terminal()).split())
    assert "it could not be measured beside its parent: it did not end in time" in text


def test_a_file_of_the_working_copy_that_all_commits_would_read_is_refused(
    repository: Path, tmp_path: Path
) -> None:
    asked = replace(
        bisect_request(repository, "main~9..main", tmp_path),
        command=("x.py", f"--config={repository}/train.py"),
    )
    with pytest.raises(DiagnoseError, match="names the working copy"):
        bisect(asked, measure=quick_run)


@pytest.mark.parametrize(
    "commits, words",
    [
        ("main..main~3", "no ancestor"),
        ("main..main", "one and the same"),
        ("main..nowhere", "no commit 'nowhere'"),
        ("--output=x..main", "no commit"),
    ],
)
def test_a_row_that_is_none_is_refused(repository: Path, commits: str, words: str) -> None:
    with pytest.raises(DiagnoseError, match=words):
        row_of_commits(repository, commits)


def test_a_suspect_that_is_no_slower_than_its_parent_is_not_named(repository: Path, tmp_path: Path) -> None:
    """The pairs beside the parent have the last word: here the machine fools the search, then stops."""

    def fooled(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        run = quick_run(replace(side, command=("-c", "print(100)")), name, folder, plan)
        subject = git(repository, "log", "-1", "--format=%s", side.commit)
        slow = int(subject.split()[1]) >= 2 and not is_beside_parent()
        return replace(run, figures={Metric.STEP_MS: run.figures[Metric.STEP_MS] * (1.2 if slow else 1)})

    said: list[str] = []

    def is_beside_parent() -> bool:
        return any("beside its parent" in line for line in said)

    asked = bisect_request(repository, "main~9..main~5", tmp_path)
    found: Bisection = bisect(asked, measure=fooled, progress=said.append)
    assert found.ending is Ending.CANNOT_TELL
    assert "not slower than its parent" in found.reason
