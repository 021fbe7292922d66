"""Which commit lost the speed, found by measurements that err."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
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
from diagnose.gate.bisection import Bisection, BisectRequest, Commit, Ending
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.pairs import Asked
from diagnose.gate.posterior import CannotRun, Odds, scatter_of, search
from diagnose.gate.result import MeasuredRun, Metric, Side, TrainingFailed, Verdict
from diagnose.report import Terminal

DROP = 0.05


def searched(
    seed: int,
    num_commits: int,
    scatter: float = 0.015,
    *,
    tails: bool = False,
    num_broken: int = 0,
    max_pairs: int = 100,
) -> tuple[int, Odds]:
    """A search among simulated commits; returns the one to find, and what was found."""
    chance = random.Random(seed)
    culprit = chance.randrange(num_commits)
    own = [chance.gauss(0, 0.002) for _ in range(num_commits)]
    broken = set(chance.sample(range(num_commits - 1), num_broken))

    def noise() -> float:
        burst = chance.uniform(-6, 6) * scatter if tails and chance.random() < 0.1 else 0.0
        return chance.gauss(0, scatter) + burst

    def measure(index: int) -> float:
        if index in broken:
            raise CannotRun
        return own[index] + (DROP if index >= culprit else 0.0) + noise()

    found = search(
        num_commits,
        measure,
        ends=[DROP + noise() for _ in range(10)],
        confidence=0.95,
        may_go_on=lambda odds: odds.num_pairs < max_pairs,
    )
    return culprit, found


@pytest.mark.parametrize("num_commits", [2, 9, 40])
@pytest.mark.parametrize("tails", [False, True], ids=["normal", "heavy tails"])
def test_the_commit_named_is_the_right_one_in_95_of_100(num_commits: int, tails: bool) -> None:
    found = [searched(seed, num_commits, tails=tails) for seed in range(100)]
    right = sum(culprit in odds.suspects()[0] for culprit, odds in found)
    assert right >= 95


def test_commits_that_do_not_run_are_not_told_from_the_next_that_does() -> None:
    found = [searched(seed, 12, num_broken=4) for seed in range(60)]
    assert sum(culprit in odds.suspects()[0] for culprit, odds in found) >= 57
    assert any(len(odds.suspects()[0]) > 1 for _, odds in found)
    assert all(not set(odds.pairs) & odds.skipped for _, odds in found)


def test_fewer_pairs_are_needed_than_commits() -> None:
    pairs = [searched(seed, 100, 0.01)[1].num_pairs for seed in range(30)]
    assert sum(pairs) / len(pairs) < 20


def test_one_wrong_answer_does_not_mislead_the_search() -> None:
    """A plain bisection of 16 commits that believes the first answer, here a lie, never recovers."""
    asked: list[int] = []

    def measure(index: int) -> float:
        asked.append(index)
        is_slow = index >= 12
        return (0.0 if is_slow else DROP) if len(asked) == 1 else (DROP if is_slow else 0.0)

    ends = [DROP + wobble for wobble in (-0.02, -0.01, -0.01, 0.0, 0.0, 0.01, 0.01, 0.02)]
    odds = search(16, measure, ends=ends, confidence=0.95)
    assert odds.suspects()[0] == range(12, 13)
    assert len(asked) > len(set(asked)), "some commit was asked again"


def test_a_search_that_is_stopped_names_its_odds() -> None:
    _, odds = searched(1, 40, 0.05, max_pairs=2)
    assert odds.num_pairs == 2
    assert odds.suspects()[1] < 0.95
    assert sum(odds.of) == pytest.approx(1)


def test_two_commits_that_lost_alike_end_the_search_soon_and_one_never_looks_like_two() -> None:
    def two(seed: int, sizes: tuple[float, float]) -> Odds:
        chance = random.Random(seed)
        return search(
            20,
            lambda index: sizes[0] * (index >= 5) + sizes[1] * (index >= 13) + chance.gauss(0, 0.01),
            ends=[sum(sizes) + chance.gauss(0, 0.01) for _ in range(10)],
            confidence=0.95,
            may_go_on=lambda odds: odds.num_pairs < 100,
        )

    found = [two(seed, (0.05, 0.05)) for seed in range(30)]
    assert sum(odds.suspects()[1] < 0.95 and odds.num_pairs < 30 for odds in found) >= 28
    larger = [two(seed, (0.1, 0.02)) for seed in range(30)]
    assert sum(odds.suspects() == (range(5, 6), pytest.approx(1, abs=0.05)) for odds in larger) >= 28
    assert all(searched(seed, 20)[1].suspects()[1] >= 0.95 for seed in range(60))


def test_one_commit_needs_no_search() -> None:
    odds = search(1, lambda index: 1 / 0, ends=[DROP] * 7, confidence=0.95)
    assert odds.suspects() == (range(1), 1.0)


def test_when_none_between_runs_all_are_suspects_together() -> None:
    def measure(index: int) -> float:
        raise CannotRun

    odds = search(5, measure, ends=[DROP] * 7, confidence=0.95)
    assert odds.suspects() == (range(5), pytest.approx(1.0))


def test_the_scatter_is_that_of_pairs_around_their_own_commit() -> None:
    chance = random.Random(3)
    groups = [[level + chance.gauss(0, 0.02) for _ in range(5)] for level in range(200)]
    assert scatter_of(groups) == pytest.approx(0.02, rel=0.15)


def git(repository: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


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
        raise TrainingFailed(
            name, f"{name} exited with {done.returncode}", exit_code=7, signal=None, last_lines=("boom",)
        )
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


def request(repository: Path, commits: str, folder: Path) -> BisectRequest:
    asked = Asked(metric=Metric.STEP_MS, steps=200, warmup=20)
    return BisectRequest(
        asked=asked, commits=commits, command=("train.py",), cwd=repository, folder=folder / "runs"
    )


def test_the_slow_commit_of_a_repository_is_found(repository: Path, tmp_path: Path) -> None:
    before = git(repository, "worktree", "list"), git(repository, "status", "--porcelain")
    found = bisect(request(repository, "main~9..main", tmp_path), measure=quick_run)
    assert found.ending is Ending.FOUND
    (index,) = found.suspects
    assert found.commits[index].subject.startswith("change 5 ")
    assert found.parent is not None
    assert found.parent.verdict is Verdict.REGRESSION
    assert found.parent.drop == pytest.approx(0.12, abs=0.03)
    assert found.why, "without records of steps it says that it cannot tell"
    assert (git(repository, "worktree", "list"), git(repository, "status", "--porcelain")) == before


def test_the_text_obeys_no_commit_message(repository: Path, tmp_path: Path) -> None:
    found = bisect(request(repository, "main~5..main~4", tmp_path), measure=quick_run)
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
            assert plan.timeout_s is not None
            raise OutOfTime
        return quick_run(side, name, folder, plan)

    found = bisect(request(repository, "main~8..main~4", tmp_path), measure=run)
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

    found = bisect(request(repository, "main~7..main~4", tmp_path), measure=run)
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

    found = bisect(request(repository, "main~8..main~4", tmp_path), measure=run)
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

    asked = request(repository, "main~9..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, metric=Metric.CPU_MS))
    found = bisect(asked, measure=run)
    assert len(of_the_end) > 3
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]


def test_a_loss_in_two_commits_is_said_to_be_one(tmp_path: Path) -> None:
    top = history(tmp_path / "toy", *[(100, 100)] * 3, *[(110, 110)] * 3, *[(121, 121)] * 3)
    found = bisect(request(top, "main~8..main", tmp_path), measure=stated)
    assert found.ending is Ending.CANNOT_TELL
    between = next(commit for commit in found.commits if commit.hash[:12] in found.reason)
    assert between.subject in ("change 3", "change 4", "change 5")
    good, bad = (git(top, "rev-parse", "--short=12", name) for name in ("main~8", "main"))
    between_hash = between.hash[:12]
    assert found.reason.endswith(f"both sides: {good}..{between_hash} and {between_hash}..{bad}")
    assert found.odds is not None and found.odds.num_pairs < 15


def test_without_a_loss_nothing_is_searched(repository: Path, tmp_path: Path) -> None:
    found = bisect(request(repository, "main~9..main~7", tmp_path), measure=quick_run)
    assert (found.ending, found.odds) == (Ending.NO_LOSS, None)
    assert found.ending.exit_code == 3
    assert "NO LOSS TO SEARCH FOR" in bisect_text(found, Terminal())


def test_a_last_commit_that_does_not_run_is_said_with_its_words(repository: Path, tmp_path: Path) -> None:
    found = bisect(request(repository, "main~9..main~1", tmp_path), measure=quick_run)
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
                raise TrainingFailed(
                    name, f"{name} failed", exit_code=1, signal=None, last_lines=("no space left",)
                )
        return quick_run(side, name, folder, plan)

    return run


def test_one_run_of_the_first_commit_that_fails_late_is_made_again(
    repository: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    run = failing(repository, 0, 9, ONCE)
    found = bisect(request(repository, "main~9..main", tmp_path), measure=run, progress=said.append)
    assert any("did not run now" in line for line in said)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]


def test_a_first_commit_that_fails_late_leaves_what_was_measured(repository: Path, tmp_path: Path) -> None:
    found = bisect(
        request(repository, "main~9..main", tmp_path), measure=failing(repository, 0, 9, FOR_GOOD)
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

    found = bisect(request(repository, "main~9..main", tmp_path), measure=run, progress=said.append)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject.split()[1] for index in found.suspects] == ["5"]
    text = " ".join(bisect_text(found, Terminal()).split())
    assert "it could not be measured beside its parent: it did not end in time" in text


def test_a_file_of_the_working_copy_that_all_commits_would_read_is_refused(
    repository: Path, tmp_path: Path
) -> None:
    asked = replace(
        request(repository, "main~9..main", tmp_path), command=("x.py", f"--config={repository}/train.py")
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

    asked = request(repository, "main~9..main~5", tmp_path)
    found: Bisection = bisect(asked, measure=fooled, progress=said.append)
    assert found.ending is Ending.CANNOT_TELL
    assert "not slower than its parent" in found.reason


# -- what a history may hold


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
    asked = replace(request(top / "jobs", "main~4..main", tmp_path), links=("data",))
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
    found = bisect(request(top, "main~3..main", tmp_path), measure=stated, progress=said.append)
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
    asked = request(top, "main~3..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, metric=Metric.SAMPLES_PER_S))
    found = bisect(asked, measure=scattered)
    assert found.ending is Ending.FOUND
    assert [found.commits[index].subject for index in found.suspects] == ["change 2"]
    assert any("of a usual step it cannot be told" in note for note in found.notes)


def test_a_loss_in_rare_steps_alone_is_searched_for_as_the_gate_finds_it(tmp_path: Path) -> None:
    top = history(tmp_path / "toy", (100, 100), (100, 100), (100, 115), (100, 115), (100, 115))
    asked = request(top, "main~4..main", tmp_path)
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

    found = bisect(request(top, "main~8..main", tmp_path), measure=first_is_slow)
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
    asked = request(top, "main~5..main", tmp_path)
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
            assert plan.timeout_s is not None
            clock[0] += plan.timeout_s
            raise OutOfTime
        return usual(side, name, folder, plan)

    asked = request(top, "main~2..main", tmp_path)
    asked = replace(asked, asked=replace(asked.asked, budget_s=190))
    found = bisect(asked, measure=measure)
    assert found.ending is Ending.CANNOT_TELL
    assert found.odds is not None
    assert not found.odds.skipped
    assert clock[0] == 190
