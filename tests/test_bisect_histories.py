"""What a history may hold, and what a search of it may cost: merges, odd commits, stalls, a budget."""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.gate import bench
from diagnose.gate import bisect as bisect_module
from diagnose.gate.as_bisect import bisect_text, next_steps, to_json
from diagnose.gate.bisect import bisect, row_of_commits
from diagnose.gate.bisection import Bisection, Commit, Ending
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.result import MeasuredRun, Metric, Side
from diagnose.report import Terminal
from tests.gates import bisect_request, git


def test_a_loss_in_two_commits_is_said_to_be_one(tmp_path: Path) -> None:
    top = history(tmp_path / "toy", *[(100, 100)] * 3, *[(110, 110)] * 3, *[(121, 121)] * 3)
    found = bisect(bisect_request(top, "main~8..main", tmp_path), measure=stated)
    assert found.ending is Ending.CANNOT_TELL
    between = next(commit for commit in found.commits if commit.hash[:12] in found.reason)
    assert between.subject in ("change 3", "change 4", "change 5")
    good, bad = (git(top, "rev-parse", "--short=12", name) for name in ("main~8", "main"))
    between_hash = between.hash[:12]
    assert found.reason.endswith(f"both sides: {good}..{between_hash} and {between_hash}..{bad}")
    assert found.odds is not None and found.odds.num_pairs < 15


def advised_for_the_merge(repository: Path) -> tuple[Commit, tuple[Commit, ...]]:
    """The row of commits that is advised where the merge at the end of the main branch is to blame."""
    good, commits = row_of_commits(repository, "main~1..main")
    found = Bisection(ending=Ending.FOUND, good=good, commits=commits, suspects=range(1))
    (advice,) = [line for line in next_steps(found) if "merge" in line]
    _, _, command = advice.partition("diagnose bisect ")
    first_word = ["sh", "-c", f'set -- {command}; printf %s "$1"']
    return row_of_commits(repository, subprocess.check_output(first_word, cwd=repository, text=True))


def test_the_advice_for_a_merge_is_a_row_that_can_be_searched(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for branch, subject in (("main", "root"), ("topic", "one"), ("topic", "two"), ("main", "meanwhile")):
        if git(tmp_path, "branch", "--show-current") != branch:
            git(tmp_path, "checkout", "-q", *([] if subject == "meanwhile" else ["-b"]), branch)
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", subject)
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "merge", "topic")
    _, inside = advised_for_the_merge(tmp_path)
    assert [commit.subject for commit in inside] == ["one", "two"]


@pytest.fixture
def updated_branch(tmp_path: Path) -> Path:
    """Of a topic that took over the main branch once, before it was merged: one, two, update, three."""
    git(tmp_path, "init", "-q", "-b", "main")

    def commits(*subjects: str) -> None:
        for subject in subjects:
            git(tmp_path, "commit", "-q", "--allow-empty", "-m", subject)

    commits("root")
    git(tmp_path, "checkout", "-q", "-b", "topic")
    commits("one", "two")
    git(tmp_path, "checkout", "-q", "main")
    commits("faster")
    git(tmp_path, "checkout", "-q", "topic")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "update", "main")
    commits("three")
    git(tmp_path, "checkout", "-q", "main")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "merge", "topic")
    return tmp_path


def test_a_branch_that_was_updated_is_searched_from_where_it_began(updated_branch: Path) -> None:
    start, inside = advised_for_the_merge(updated_branch)
    assert start.subject == "root"
    assert [commit.subject for commit in inside] == ["one", "two", "update", "three"]


def test_a_start_that_came_by_a_merge_is_refused(updated_branch: Path) -> None:
    """What came before the merge lacks what the start has, and would look slow for it."""
    root = git(updated_branch, "rev-parse", "--short=12", "main~2")
    with pytest.raises(DiagnoseError, match=f"Begin where the branch does: {root}"):
        row_of_commits(updated_branch, "main~1..topic")


GPG = """\
#!/bin/sh
case "$*" in *--verify*) echo 'gpg: Good signature from a\tb\tc' >&2; exit 0 ;; esac
cat > /dev/null
echo '[GNUPG:] SIG_CREATED ' >&2
printf -- '-----BEGIN PGP SIGNATURE-----\\n\\nx\\n-----END PGP SIGNATURE-----\\n'
"""


def test_a_row_of_commits_survives_any_subject_and_signatures(tmp_path: Path) -> None:
    gpg = tmp_path / "gpg"
    gpg.write_text(GPG)
    gpg.chmod(0o755)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "config", "log.showSignature", "true")
    git(tmp_path, "config", "gpg.program", str(gpg))
    subjects = ["good", "line\u2028separator", "form\x0cfeed", "next\x85line", "tab\tin it", "bad"]
    for subject in subjects:
        git(tmp_path, "commit", "-q", "--allow-empty", "-S", "-m", subject)
    assert "Good signature" in git(tmp_path, "log", "-1"), "the signatures are there to be shown"
    good, commits = row_of_commits(tmp_path, "main~5..main")
    assert [commit.subject for commit in (good, *commits)] == subjects
    assert commits[-1].hash == git(tmp_path, "rev-parse", "main")


def stated(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
    """Reads what a usual step and the mean step take off the commit's script; a little chance is added."""
    usual_ms, mean_ms = json.loads((side.root / "train.py").read_text().splitlines()[0])
    wobble = random.Random(name).gauss(1, 0.005)
    return MeasuredRun(
        name=name,
        folder=folder / name,
        root=side.root,
        figures={
            Metric.STEP_MS: usual_ms * wobble,
            Metric.SAMPLES_PER_S: 32_000 / (usual_ms * wobble),
            Metric.MEAN_SAMPLES_PER_S: 32_000 / (mean_ms * wobble),
        },
        num_steps=plan.steps,
        warmup=20,
        step_s=usual_ms / 1000,
        wall_s=10.0,
    )


def history(top: Path, *costs_ms: tuple[int, int], folder: str = ".") -> Path:
    """A repository whose commits take so long for a usual step and for the mean one."""
    (top / folder).mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    for number, costs in enumerate(costs_ms):
        (top / folder / "train.py").write_text(f"{json.dumps(costs)}\n# {number}\n")
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", f"change {number}")
    return top


def test_a_commit_without_the_folder_or_with_its_own_data_is_left_out(tmp_path: Path) -> None:
    top = history(tmp_path / "toy", (100, 100), (100, 100), folder="jobs")
    steps: list[tuple[str, ...]] = [
        ("git mv jobs elsewhere",),
        ("git mv elsewhere jobs", "mkdir data", "touch data/own", "git add data"),
        ("git rm -q -r data", "echo '[112, 112]' > jobs/train.py"),
    ]
    for number, lines in enumerate(steps, 2):
        subprocess.run(["sh", "-e", "-c", "\n".join(lines)], cwd=top, check=True)
        git(top, "commit", "-q", "-a", "-m", f"change {number}")
    (top / "data").mkdir()
    asked = replace(bisect_request(top / "jobs", "main~4..main", tmp_path), links=("data",))
    said: list[str] = []
    found = bisect(asked, measure=stated, progress=said.append)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject for index in found.suspects] == [
        "change 2",
        "change 3",
        "change 4",
    ]
    text = "\n".join(said)
    assert "has no folder jobs" in text
    assert "--link data: git holds it" in text


def test_a_commit_that_cannot_be_checked_out_is_left_out(tmp_path: Path) -> None:
    """As where the object of a large file is gone from the server."""
    top = history(tmp_path / "toy", (100, 100), (100, 100))
    steps: list[tuple[str, ...]] = [
        ("echo 'train.py filter=gone' > .gitattributes", "echo '# 2' >> train.py", "git add ."),
        ("git rm -q .gitattributes", "echo '[112, 112]' > train.py"),
        ("echo '# 4' >> train.py",),
    ]
    for number, lines in enumerate(steps, 2):
        subprocess.run(["sh", "-e", "-c", "\n".join(lines)], cwd=top, check=True)
        git(top, "commit", "-q", "-a", "-m", f"change {number}")
    git(top, "config", "filter.gone.smudge", "false")
    git(top, "config", "filter.gone.required", "true")
    said: list[str] = []
    found = bisect(bisect_request(top, "main~3..main", tmp_path), measure=stated, progress=said.append)
    assert found.ending is Ending.FOUND
    assert found.odds is not None
    assert found.odds.skipped == {0}
    assert [found.commits[index].subject for index in found.suspects] == ["change 2", "change 3"]
    assert any("git worktree failed" in line for line in said)


def test_a_certain_loss_with_every_stall_is_searched_for_where_usual_steps_scatter(tmp_path: Path) -> None:
    draws = random.Random(1)  # not by the runs' names, which hold the commits' hashes

    def scattered(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        run = stated(side, name, folder, plan)
        usual = run.figures[Metric.SAMPLES_PER_S] * draws.lognormvariate(0, 0.2)
        return replace(run, figures={**run.figures, Metric.SAMPLES_PER_S: usual})

    top = history(tmp_path / "toy", (100, 100), (100, 100), (100, 150), (100, 150))
    asked = bisect_request(top, "main~3..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, metric=Metric.SAMPLES_PER_S))
    found = bisect(asked, measure=scattered)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject for index in found.suspects] == ["change 2"]
    assert any("of a usual step it cannot be told" in note for note in found.notes)


def test_a_loss_in_rare_steps_alone_is_searched_for_as_the_gate_finds_it(tmp_path: Path) -> None:
    top = history(tmp_path / "toy", (100, 100), (100, 100), (100, 115), (100, 115), (100, 115))
    asked = bisect_request(top, "main~4..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, metric=Metric.SAMPLES_PER_S))
    found = bisect(asked, measure=stated)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject for index in found.suspects] == ["change 2"]
    assert "the loss is in rare ones" in " ".join(bisect_text(found, Terminal()).split())
    assert any("rare" in note for note in to_json(found)["notes"])
    of_steps = replace(asked, asked=replace(asked.asked, metric=Metric.STEP_MS))
    assert bisect(of_steps, measure=stated).ending is Ending.NO_LOSS


def test_the_first_run_in_a_new_worktree_is_not_held_against_its_commit(tmp_path: Path) -> None:
    """It has to compile its byte code first: here that costs half as much again."""
    top = history(tmp_path / "toy", *[(100, 100)] * 6, *[(112, 112)] * 3)
    lengths: list[int] = []

    def first_is_slow(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        run = stated(side, name, folder, plan)
        mark = side.root / "__pycache__"
        if mark.exists():
            return run
        mark.mkdir()
        lengths.append(plan.steps)
        return replace(run, figures={Metric.STEP_MS: 1.5 * run.figures[Metric.STEP_MS]})

    found = bisect(bisect_request(top, "main~8..main", tmp_path), measure=first_is_slow)
    assert [found.commits[index].subject for index in found.suspects] == ["change 6"]
    assert found.odds is not None
    for index, logs in found.odds.pairs.items():
        cost = 0.0 if index < 5 else math.log(1.12)
        assert logs == pytest.approx([cost] * len(logs), abs=0.03)
    assert set(lengths[2:]) == {20}, "a rehearsal is short"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of a search, which goes on only where a test lets it."""
    now = [0.0]
    for module in (bench, bisect_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def ten_seconds_each(now: list[float]) -> Callable[[Side, str, Path, RunPlan], MeasuredRun]:
    def measure(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        now[0] += 10
        return stated(side, name, folder, plan)

    return measure


@pytest.mark.parametrize("budget_s", [170, 230, 330, 400])
def test_the_budget_is_kept_whatever_it_is_spent_on(
    tmp_path: Path, clock: list[float], budget_s: int
) -> None:
    top = history(tmp_path / "toy", *[(100, 100)] * 3, *[(112, 112)] * 3)
    asked = bisect_request(top, "main~5..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, budget_s=budget_s))
    found = bisect(asked, measure=ten_seconds_each(clock))
    assert clock[0] <= budget_s
    if budget_s == 170:
        assert found.ending is Ending.CANNOT_TELL
    if budget_s == 330:
        assert found.ending is Ending.FOUND
        assert found.parent is None
        assert "the budget was used up after" in " ".join(bisect_text(found, Terminal()).split())


def test_a_commit_that_the_budget_cut_short_does_not_count_as_one_that_hangs(
    tmp_path: Path, clock: list[float]
) -> None:
    top = history(tmp_path / "toy", (100, 100), (100, 100), (112, 112))
    usual = ten_seconds_each(clock)

    def measure(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        if "# 1" in (side.root / "train.py").read_text():
            assert math.isfinite(plan.timeout_s)
            clock[0] += plan.timeout_s
            raise OutOfTime
        return usual(side, name, folder, plan)

    asked = bisect_request(top, "main~2..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, budget_s=190))
    found = bisect(asked, measure=measure)
    assert found.ending is Ending.CANNOT_TELL
    assert found.odds is not None
    assert not found.odds.skipped
    assert clock[0] == 190
