"""A history of jobs: what it lets a gate say, and the commands that keep it."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diagnose.cli.main import add_command
from diagnose.core.errors import DiagnoseError
from diagnose.core.phases import Phase
from diagnose.gate import compare_commits, history_why, update
from diagnose.gate.baseline import Baseline, Entry, save
from diagnose.gate.by_history import LEAST_ENTRIES, judge_by_history
from diagnose.gate.compare_history import compare_with_history
from diagnose.gate.fingerprint import Fingerprint, fingerprint_of
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.pairs import Asked
from diagnose.gate.result import MeasuredRun, Metric, Side, Verdict
from diagnose.gate.update import current_branch
from diagnose.gate.words import change, sensitivity
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
    for verb in ("gate", "baseline"):
        add_command(app, verb)
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
        Verdict.INCONCLUSIVE,
        Verdict.INCONCLUSIVE,
        Verdict.REGRESSION,
    ]
    same, slower, _ = verdicts
    assert same is not None and slower is not None
    assert re.search(r"a drop of up to 1\d\.\d % could go unseen", same.reason)
    assert re.search(r"only a drop of 1\d\.\d % is beyond chance", slower.reason)
    faster = judge_by_history(wide, job(8), Metric.STEP_MS, 0.03)
    assert faster is not None and faster.verdict is Verdict.PASS, "a gain beyond all chance"
    allowed = judge_by_history(wide, job(10), Metric.STEP_MS, 0.2)
    assert allowed is not None and allowed.verdict is Verdict.PASS


@pytest.mark.parametrize("jobs", [20, 30])
def test_a_slow_creep_is_a_loss_although_each_job_is_like_the_one_before(jobs: int) -> None:
    rng = random.Random(5)
    levels = [10 * 1.10 ** (number / jobs) * rng.lognormvariate(0, 0.003) for number in range(jobs + 1)]
    creeping = Baseline(fingerprint=PRINT, entries=tuple(map(entry, levels[:-1])))
    judgement = judge_by_history(creeping, job(levels[-1]), Metric.STEP_MS, 0.06)
    assert judgement is not None
    assert judgement.verdict is Verdict.REGRESSION
    oldest = jobs // 3
    assert judgement.against.startswith(f"compared with the oldest {oldest} of {jobs} jobs")
    assert judgement.base == pytest.approx(statistics.median(levels[:oldest]))
    assert judgement.drop == pytest.approx(levels[-1] / judgement.base - 1, abs=1e-4)


def test_a_history_that_became_faster_is_judged_by_its_newest_jobs() -> None:
    rng = random.Random(6)
    levels = [10 * 0.9 ** (number / 20) * rng.lognormvariate(0, 0.003) for number in range(21)]
    before = Baseline(fingerprint=PRINT, entries=tuple(map(entry, levels[:-1])))
    same = judge_by_history(before, job(levels[-1]), Metric.STEP_MS, 0.05)
    assert same is not None and same.verdict is Verdict.PASS
    assert same.detectable < 0.07
    lost = judge_by_history(before, job(10.0), Metric.STEP_MS, 0.05)
    assert lost is not None and lost.verdict is Verdict.REGRESSION, "although it was no faster once"
    assert lost.against == "compared with the newest 6 of 20 jobs"


# -- why


def with_phases(forward_ms: float, data_ms: float = 2.0) -> Entry:
    phases = {Phase.FORWARD: forward_ms, Phase.DATA_WAIT: data_ms, Phase.BACKWARD: 4.0}
    return replace(entry(forward_ms + data_ms + 4.0), phase_ms=phases)


def why(
    before: Baseline, now: Mapping[Phase, float], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Any:
    """What a job whose phases took so long is attributed to."""
    monkeypatch.setattr(history_why, "phase_times", lambda runs: now)
    judgement = judge_by_history(before, job(20), Metric.STEP_MS, 0.03)
    assert judgement is not None
    return history_why.explain_by_history(before, replace(judgement, **changes), job(20))


def test_the_phase_that_grew_since_earlier_jobs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    entries = tuple(with_phases(4 * rng.lognormvariate(0, 0.01)) for _ in range(12))
    before = Baseline(fingerprint=PRINT, entries=entries)
    now = {Phase.FORWARD: 5.0, Phase.DATA_WAIT: 2.0, Phase.BACKWARD: 4.0}
    (reason,) = why(before, now, monkeypatch)
    assert re.fullmatch(
        r"forward took \d\.\d\d ms \(.* to .*\) longer per step \(it took [\d.]+ ms\), 100 % of the loss",
        reason.text,
    )
    assert reason.lost_share == pytest.approx(1.0)
    (new,) = why(before, {**entries[0].phase_ms, Phase.CHECKPOINT: 1.0}, monkeypatch)
    assert new.text.startswith("checkpoint took 1.00 ms (1.00 to 1.00) longer per step (it is new)")


def test_what_earlier_jobs_do_not_tell_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {Phase.FORWARD: 5.0}
    (old,) = why(history(), now, monkeypatch)
    assert old.text.startswith("cannot tell which phase lost the time: 0 of 12 jobs in the baseline tell")
    entries = tuple(with_phases(4 + number % 2, 3 - number % 2) for number in range(12))
    (noise,) = why(
        Baseline(fingerprint=PRINT, entries=entries),
        {**entries[0].phase_ms, Phase.FORWARD: 5.5},
        monkeypatch,
    )
    assert noise.text.endswith("none grew by more than jobs differ anyway")
    even = {phase: 1.1 * time for phase, time in with_phases(4.0).phase_ms.items()}
    steady = Baseline(fingerprint=PRINT, entries=(with_phases(4.0),) * 12)
    (machine,) = why(steady, even, monkeypatch)
    assert machine.text.startswith("every phase of weight took 10 % to 10 % longer than in earlier jobs")
    (memory,) = why(steady, even, monkeypatch, metric=Metric.PEAK_MEMORY)
    assert memory.text == "peak host memory is not time of the steps: no phase can explain it"


def test_too_short_a_history_and_too_few_runs_cannot_tell() -> None:
    short = judge_by_history(history(jobs=LEAST_ENTRIES - 1), job(20), Metric.STEP_MS, 0.03)
    assert short is not None and short.verdict is Verdict.INCONCLUSIVE
    assert short.reason.startswith("the baseline holds 9 jobs; 10 are needed")
    assert sensitivity(short) == "9 jobs in the baseline: too few to say which drop would be found"
    few = judge_by_history(history(), job(20, runs=2), Metric.STEP_MS, 0.03)
    assert few is not None and few.verdict is Verdict.INCONCLUSIVE
    one = judge_by_history(history(jobs=1), job(10), Metric.STEP_MS, 0.03)
    assert one is not None and one.verdict is Verdict.INCONCLUSIVE
    assert change(one) == "step time is 0.2 % higher", "one job has no interval"
    assert judge_by_history(history(), job(10), Metric.STARTUP, 0.03) is None


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
    (path.parent / "0.json").write_text("<<<<<<< HEAD\n")
    shown = verbs("baseline", "list")
    assert path.stem in shown.stdout
    assert "0.json is not a baseline" in shown.output
    listed = json.loads(verbs("baseline", "list", "--json", "-").stdout)
    assert [each.get("jobs") for each in listed["baselines"]] == [10, None]
    (path.parent / "0.json").unlink()

    call = ("gate", "--baseline", ".diagnose/baselines", "--json", "out.json", "--", "train.py")
    assert verbs(*call).exit_code == 0
    (tmp_path / "train.py").write_text(stand_in(11))
    assert verbs(*call).exit_code == 1
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["drop"] == pytest.approx(1 / 11, abs=0.01)
    assert [reason["kind"] for reason in answer["why"]] == ["phase"]
    assert "diagnose gate --ab BASE..HEAD" in answer["advice"]

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


def test_a_job_that_hangs_fails_where_earlier_ones_took_so_much_less(tmp_path: Path) -> None:
    given: list[float] = []

    def measure(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
        given.append(plan.timeout_s)
        raise OutOfTime

    entries = tuple(
        replace(each, metrics={**each.metrics, Metric.STARTUP: 90.0}) for each in history().entries
    )
    command = Fingerprint(hard={"command": "train.py"})
    save(Baseline(fingerprint=command, entries=entries), tmp_path / "b.json")
    plumbing = compare_commits.Plumbing(measure=measure)
    side = Side(label="head", name="x", root=tmp_path, command=("train.py",))
    found = compare_with_history(side, Asked(), tmp_path / "b.json", tmp_path / "runs", plumbing=plumbing)
    assert found.verdict is Verdict.FAILED
    assert given == [pytest.approx(10 * (90 + 220 * 0.01), rel=0.01)]
    unknown = replace(side, command=("other.py",))
    compare_with_history(unknown, Asked(), tmp_path / "b.json", tmp_path / "runs", plumbing=plumbing)
    assert given[1] == math.inf, "nothing is known of its time"


def test_a_job_that_no_longer_trains_fails_where_earlier_ones_did(
    verbs: Callable[..., Any], tmp_path: Path
) -> None:
    assert verbs("baseline", "update", "--place", "b.json", "--", "train.py").exit_code == 0
    (tmp_path / "train.py").write_text("pass\n")
    call = ("gate", "--baseline", "b.json", "--inconclusive", "pass", "--", "train.py")
    ended = verbs(*call)
    assert ended.exit_code == 5, ended.output
    assert "no optimizer step was seen in head-00, where earlier jobs trained" in ended.output
    never = verbs("baseline", "update", "--place", "b.json", "--", "train.py")
    assert "nothing is recorded: no optimizer step was seen" in str(never.exception)


def test_a_pass_that_rests_on_scattered_jobs_is_a_warning_too(tmp_path: Path) -> None:
    """And only where the scatter, not what is allowed, decides which drop is seen."""
    (tmp_path / "train.py").write_text(stand_in(10))
    side = Side(label="head", name="x", root=tmp_path, command=("train.py",))
    plumbing = compare_commits.Plumbing(measure=measured_stand_in)
    now = fingerprint_of(tmp_path, side.command)
    for scatter, warned in ((0.010, True), (0.004, False)):
        save(replace(history(scatter=scatter), fingerprint=now), tmp_path / "b.json")
        folder = tmp_path / str(scatter)
        found = compare_with_history(side, Asked(), tmp_path / "b.json", folder, plumbing=plumbing)
        assert found.verdict is Verdict.PASS
        assert any("is beyond chance" in note for note in found.notes) == warned


def test_what_this_job_could_not_measure_is_not_missing_in_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(stand_in(10))
    side = Side(label="head", name="x", root=tmp_path, command=("train.py",))
    plumbing = compare_commits.Plumbing(measure=measured_stand_in)
    now, place = fingerprint_of(tmp_path, side.command), tmp_path / "b.json"
    figures = {Metric.INSTRUCTIONS: 1e9, Metric.STEP_MS: 10.0}
    entries = tuple(replace(each, metrics=figures, runs=(figures,) * 3) for each in history().entries)
    save(Baseline(fingerprint=now, entries=entries), place)
    found = compare_with_history(
        side, Asked(metric=Metric.INSTRUCTIONS), place, tmp_path / "runs", plumbing=plumbing
    )
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "could not be measured in this job" in found.causes[0]
    assert "Choose another one" in found.advice


def test_a_wild_job_still_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(stand_in(10, scatter=WILD))
    side = Side(label="head", name="x", root=tmp_path, command=("train.py",))
    plumbing = compare_commits.Plumbing(measure=measured_stand_in)
    place = tmp_path / "b.json"
    save(history(), place)
    found = compare_with_history(side, Asked(), place, tmp_path / "runs", plumbing=plumbing)
    assert found.verdict is Verdict.MISMATCH
    assert any(cause.startswith("cpu: A then") for cause in found.causes)
