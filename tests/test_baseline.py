"""A history of jobs: what it lets a gate say, when it is of another machine, and the file it lies in."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diagnose.cli import baseline as baseline_verb
from diagnose.cli import gate as gate_verb
from diagnose.core.errors import DiagnoseError
from diagnose.gate import compare_commits, update
from diagnose.gate.baseline import (
    LEAST_ENTRIES,
    MOST_ENTRIES,
    Baseline,
    Entry,
    file_for,
    judge_by_history,
    load,
    save,
)
from diagnose.gate.compare_history import compare_with_history
from diagnose.gate.fingerprint import Fingerprint, differences, machine_facts, soft_facts
from diagnose.gate.pairs import Asked
from diagnose.gate.result import MeasuredRun, Metric, Side, Verdict
from diagnose.gate.update import current_branch
from tests.gates import WILD, git, measured_stand_in, repository, stand_in

PRINT = Fingerprint(hard={"cpu": "A", "gpus": ["X", "X"]}, soft={"driver": "1"})


def entry(step_ms: float) -> Entry:
    figures = {Metric.STEP_MS: step_ms, Metric.SAMPLES_PER_S: 32_000 / step_ms}
    return Entry(when="2026-11-21", commit="abc", branch="main", metrics=figures, runs=(figures,) * 3)


def history(*, jobs: int = 12, scatter: float = 0.004) -> Baseline:
    rng = random.Random(4)
    entries = tuple(entry(10 * rng.lognormvariate(0, scatter)) for _ in range(jobs))
    return Baseline(fingerprint=PRINT, entries=entries)


def job(step_ms: float, runs: int = 3) -> list[MeasuredRun]:
    figures = entry(step_ms).metrics
    return [MeasuredRun(name=f"{n}", folder=Path(), root=Path(), figures=figures) for n in range(runs)]


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`gate` and `baseline` with the stand-in for the training, in a repository."""
    real = compare_commits.Plumbing
    fake = partial(real, measure=measured_stand_in)
    monkeypatch.setattr(compare_commits, "Plumbing", fake)
    monkeypatch.setattr(update, "Plumbing", lambda measure, progress: fake(progress=progress))
    for name in ("GITHUB_ACTIONS", *update.BRANCH_VARIABLES, "CI_DEFAULT_BRANCH"):
        monkeypatch.delenv(name, raising=False)
    repository(tmp_path, stand_in(10))
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    gate_verb.command(app)
    baseline_verb.command(app)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


# -- the verdict


@pytest.mark.parametrize(
    "step_ms, verdict",
    [(10, Verdict.PASS), (8, Verdict.PASS), (10.25, Verdict.PASS), (10.6, Verdict.REGRESSION)],
)
@pytest.mark.parametrize("metric", [Metric.STEP_MS, Metric.SAMPLES_PER_S])
def test_a_job_is_judged_by_earlier_ones(step_ms: float, verdict: Verdict, metric: Metric) -> None:
    judgement = judge_by_history(history(), job(step_ms), metric, 0.03)
    assert judgement is not None
    assert judgement.verdict is verdict
    assert 0.03 < judgement.detectable < 0.06


def test_between_what_is_allowed_and_what_machines_do_it_cannot_tell() -> None:
    wide = history(scatter=0.03)
    verdicts = [judge_by_history(wide, job(step_ms), Metric.STEP_MS, 0.03) for step_ms in (10, 10.7, 13)]
    assert [each.verdict for each in verdicts if each] == [
        Verdict.PASS,
        Verdict.INCONCLUSIVE,
        Verdict.REGRESSION,
    ]
    assert verdicts[1] is not None
    assert re.search(r"only a drop of 1\d\.\d % is beyond chance", verdicts[1].reason)


def test_too_short_a_history_and_too_few_runs_cannot_tell() -> None:
    short = judge_by_history(history(jobs=LEAST_ENTRIES - 1), job(20), Metric.STEP_MS, 0.03)
    assert short is not None and short.verdict is Verdict.INCONCLUSIVE
    assert short.reason.startswith("the baseline holds 9 jobs; 10 are needed")
    few = judge_by_history(history(), job(20, runs=2), Metric.STEP_MS, 0.03)
    assert few is not None and few.verdict is Verdict.INCONCLUSIVE
    one = judge_by_history(history(jobs=1), job(10), Metric.STEP_MS, 0.03)
    assert one is not None and one.verdict is Verdict.INCONCLUSIVE
    assert judge_by_history(history(), job(10), Metric.STARTUP, 0.03) is None


# -- the file


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / ".diagnose" / "baselines" / f"{PRINT.key}.json"
    save(history(), path)
    again = load(path)
    assert again.fingerprint == PRINT
    assert [each.metrics[Metric.STEP_MS] for each in again.entries] == [
        pytest.approx(each.metrics[Metric.STEP_MS], rel=1e-5) for each in history().entries
    ]
    assert file_for(path.parent, PRINT) == path == file_for(path, PRINT)


def test_only_the_last_thirty_jobs_are_kept() -> None:
    baseline = history(jobs=MOST_ENTRIES)
    longer = baseline.with_entry(entry(11))
    assert len(longer.entries) == MOST_ENTRIES
    assert longer.entries[-1] == entry(11)
    assert longer.entries[0] == baseline.entries[1]


def test_git_sees_the_baselines_and_nothing_else_of_ours(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    (tmp_path / ".diagnose" / "runs").mkdir(parents=True)
    (tmp_path / ".diagnose" / "runs" / "run.json").write_text("{}")
    (tmp_path / ".diagnose" / ".gitignore").write_text("*\n")  # as `diagnose run` leaves it
    save(history(), tmp_path / ".diagnose" / "baselines" / "abc.json")
    seen = git(tmp_path, "status", "--porcelain", "--untracked-files=all").split()[1::2]
    assert seen == [".diagnose/.gitignore", ".diagnose/baselines/abc.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 1, "fingerprint": {}, "entries": [1]}', '{"schema": "x"}', "\udc80"],
)
def test_a_damaged_baseline_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DiagnoseError, match="is not a baseline"):
        load(path)


def test_a_figure_that_is_no_figure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save(history(), path)
    for wrong in ("-1", "0", "NaN", "Infinity", '"fast"'):
        data = re.sub(r'"step_ms": [\d.]+', f'"step_ms": {wrong}', path.read_text(), count=1)
        (tmp_path / "c.json").write_text(data)
        with pytest.raises(DiagnoseError, match="is not a baseline"):
            load(tmp_path / "c.json")


def test_a_newer_baseline_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(DiagnoseError, match="newer diagnose"):
        load(path)


def test_what_a_newer_version_added_does_not_disturb(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save(history(), path)
    path.write_text(path.read_text().replace('"step_ms"', '"new_metric": 1.5, "step_ms"'))
    assert len(load(path).entries) == 12


# -- the fingerprint


def test_the_key_depends_on_hard_facts_alone() -> None:
    assert PRINT.key == Fingerprint(hard=dict(reversed(PRINT.hard.items())), soft={"driver": "2"}).key
    assert PRINT.key != Fingerprint(hard={**PRINT.hard, "cpu": "B"}, soft=PRINT.soft).key
    assert re.fullmatch("[0-9a-f]{12}", PRINT.key)


def test_differences_are_said_in_words() -> None:
    assert differences(PRINT.hard, {"cpu": "B", "gpus": [], "cuda": "13.0"}) == (
        "cpu: A then, B now",
        "gpus: X + X then, none now",
        "cuda: none then, 13.0 now",
    )


def test_this_machine_is_described_without_importing_torch() -> None:
    facts = machine_facts()
    assert facts["cpu"] and facts["cpus"] >= 1
    assert re.fullmatch(r"\d+\.\d+", facts["torch"]), "patch releases are soft"
    assert machine_facts() == facts
    assert json.dumps(soft_facts())


# -- the commands


def test_a_history_is_recorded_and_judged_by(verbs: Callable[..., Any], tmp_path: Path) -> None:
    for number in range(1, LEAST_ENTRIES + 1):
        ended = verbs("baseline", "update", "--", "train.py")
        assert ended.exit_code == 0, ended.output
        assert f"holds {number} job{'s' if number > 1 else ''} now" in ended.output
        if number == 1:
            early = verbs("gate", "--baseline", ".diagnose/baselines", "--", "train.py")
            assert early.exit_code == 3
            assert "holds 1 job; 10 are needed" in " ".join(early.stdout.split())
    (path,) = (tmp_path / ".diagnose" / "baselines").glob("*.json")
    written = json.loads(path.read_text())
    assert written["key"] == path.stem
    assert len(written["entries"][0]["runs"]) == 3
    assert written["entries"][0]["commit"] == git(tmp_path, "rev-parse", "HEAD")
    shown = verbs("baseline", "show").stdout
    assert "beyond the scatter between jobs" in shown
    assert verbs("baseline", "list").stdout.startswith(f"{path.stem}   10 jobs")
    listed = json.loads(verbs("baseline", "list", "--json", "-").stdout)
    assert listed["baselines"][0]["jobs"] == 10

    call = ("gate", "--baseline", ".diagnose/baselines", "--json", "out.json", "--", "train.py")
    assert verbs(*call).exit_code == 0
    (tmp_path / "train.py").write_text(stand_in(11))
    assert verbs(*call).exit_code == 1
    assert json.loads((tmp_path / "out.json").read_text())["drop"] == pytest.approx(1 / 11, abs=0.01)

    before = path.read_text()
    (tmp_path / "train.py").write_text(stand_in(11, exit_code=3))
    failed = verbs("baseline", "update", "--", "train.py")
    assert isinstance(failed.exception, DiagnoseError)
    assert verbs(*call).exit_code == 5
    assert path.read_text() == before, "nothing is recorded where the command fails"

    other = json.loads(before)
    other["fingerprint"]["hard"]["cpu"] = "Another CPU"
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "train.py").write_text(stand_in(10))
    mismatched = verbs("gate", "--baseline", "other.json", "--", "train.py")
    assert mismatched.exit_code == 4
    assert "cpu: Another CPU then," in " ".join(mismatched.stdout.split())
    shown_anyway = verbs("gate", "--baseline", "other.json", "--allow-machine-mismatch", "--", "train.py")
    assert shown_anyway.exit_code == 4, "never a pass"
    assert "samples/s:" in shown_anyway.stdout


def test_a_missing_baseline_is_a_verdict_of_its_own(verbs: Callable[..., Any], tmp_path: Path) -> None:
    ended = verbs("gate", "--baseline", "none.json", "--", "train.py")
    assert ended.exit_code == 4
    assert "diagnose baseline update" in ended.output
    (tmp_path / "b").mkdir()
    assert verbs("gate", "--baseline", "b", "--", "train.py").exit_code == 4
    assert verbs("baseline", "list").exit_code == 0
    with pytest.raises(DiagnoseError, match="there is no baseline 'x'"):
        raise verbs("baseline", "show", "x").exception


def test_a_baseline_is_recorded_on_the_main_branch_alone(
    verbs: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "checkout", "--quiet", "-b", "topic")
    ended = verbs("baseline", "update", "--", "train.py")
    assert "this is 'topic', not main" in str(ended.exception)
    assert verbs("baseline", "update", "--branch", "topic", "--", "train.py").exit_code == 0
    assert current_branch(tmp_path, {"GITHUB_REF_NAME": "main"}) == "main"
    assert current_branch(tmp_path, {"CI_COMMIT_BRANCH": "trunk", "CI_DEFAULT_BRANCH": "trunk"}) == "trunk"


def test_a_wild_job_still_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(stand_in(10, scatter=WILD))
    side = Side(label="head", name="x", root=tmp_path, command=("train.py",))
    plumbing = compare_commits.Plumbing(measure=measured_stand_in)
    place = tmp_path / "b.json"
    save(history(), place)
    found = compare_with_history(side, Asked(), place, tmp_path / "runs", plumbing=plumbing)
    assert found.verdict is Verdict.MISMATCH
    assert any(cause.startswith("cpu: A then") for cause in found.causes)
