"""`diagnose gate --baseline`: one version against what earlier jobs measured."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.gate.baseline import (
    COMPARABLE,
    RUNS,
    Baseline,
    Entry,
    file_for,
    load,
    mismatch,
    soft_mismatch,
)
from diagnose.gate.by_history import DEVIATIONS, judge_by_history
from diagnose.gate.compare_commits import BESIDE, Plumbing, explained, failed, sigterm_unwinds
from diagnose.gate.fingerprint import Fingerprint, fingerprint_of
from diagnose.gate.fitting import STEPS, fitted, run_s
from diagnose.gate.history_why import explain_by_history
from diagnose.gate.judging import drop_of, log_of, why_useless
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.noise import advice, causes, if_not_measured
from diagnose.gate.pairs import Asked, never_trained, used_up
from diagnose.gate.patience import hang, time_limit
from diagnose.gate.ranks_read import of_ranks, why_other_ranks
from diagnose.gate.result import (
    GateResult,
    Judgement,
    MeasuredRun,
    Metric,
    Side,
    TrainingFailed,
    Verdict,
)
from diagnose.gate.steps import MIN_WARMUP
from diagnose.gate.words import format_percent

UPDATE = "Record one, on the main branch: diagnose baseline update -- TRAINING COMMAND"

SIDE_BY_SIDE = "Compare in one job instead, where machines do not differ: diagnose gate --ab BASE..HEAD"


def compare_with_history(
    side: Side,
    asked: Asked,
    place: Path,
    folder: Path,
    *,
    allow_mismatch: bool = False,
    plumbing: Plumbing | None = None,
) -> GateResult:
    """Measures a job and judges it by the baseline of this kind of machine.

    Args:
        side: What to run.
        asked: What to judge.
        place: The baseline's file, or the folder of all of them.
        folder: Where the runs are kept.
        allow_mismatch: Whether another machine's baseline is shown instead of refused; it never passes.
        plumbing: What a test puts in place of the real thing.

    Raises:
        DiagnoseError: If the baseline is damaged.
    """
    plumbing = plumbing or Plumbing()
    begun = time.monotonic()
    result = GateResult(
        verdict=Verdict.MISMATCH,
        metric=asked.metric,
        asked=asked.metric,
        max_drop=asked.max_drop,
        sides=(side,),
        folder=folder,
    )
    if not place.exists():
        return replace(result, causes=(f"there is no baseline {place}",), advice=UPDATE)
    made: list[MeasuredRun] = []
    try:
        with sigterm_unwinds():
            usual_s = _usual_s(place, side.command, asked)
            stopped = measure_job(side, asked, folder, plumbing, made, usual_s=usual_s)
    except TrainingFailed as error:
        return failed(result, error.failure, made, begun)
    result = replace(result, runs=tuple(made), notes=of_ranks(made), wall_s=time.monotonic() - begun)
    if stopped:
        return replace(
            result,
            verdict=Verdict.INCONCLUSIVE,
            causes=(stopped,),
            advice=advice((), asked.metric, (), stopped),
        )
    now = fingerprint_of(made[-1].folder, side.command)
    result = replace(result, fingerprint={"hard": now.hard, "soft": now.soft})
    path = file_for(place, now)
    try:
        baseline = load(path)
    except FileNotFoundError:
        return replace(result, causes=_why_none(place, path, now), advice=UPDATE)
    return _judged(result, baseline, now, made, asked, allow_mismatch)


def measure_job(
    side: Side,
    asked: Asked,
    folder: Path,
    plumbing: Plumbing,
    made: list[MeasuredRun],
    *,
    usual_s: float = math.inf,
) -> str:
    """Makes a rehearsal and the runs of a job, and adds the latter to `made`; says why it stopped early.

    Args:
        side: What to run.
        asked: How long.
        folder: Where the runs are kept.
        plumbing: What a test puts in place of the real thing.
        made: The runs that count.
        usual_s: What the rehearsal takes, as far as that is known.

    Raises:
        TrainingFailed: If a run does not end well, or hangs, or does no step where earlier jobs did.
    """
    begun, has_history = time.monotonic(), math.isfinite(usual_s)

    def left_s() -> float:
        return asked.budget_s - (time.monotonic() - begun)

    plan = RunPlan(steps=asked.steps or STEPS, warmup=asked.warmup or 0, finds_warmup=asked.warmup is None)
    first: MeasuredRun | None = None
    for number in range(RUNS + 1):
        name, left = f"head-{number:02d}", left_s()
        try:
            run = plumbing.measure(side, name, folder, replace(plan, timeout_s=time_limit(usual_s, left)))
        except OutOfTime as late:
            failure = hang(name, usual_s, left, late)
            if failure is not None:
                raise failure from late
            return used_up(asked, number)
        useless = why_useless(run) or why_other_ranks(first or run, run)
        if useless and not run.figures and has_history:
            raise never_trained(run, "earlier jobs trained")
        if useless:
            return useless
        first = first or run
        if number:
            made.append(run)
            plumbing.progress(f"run {number} of {RUNS}: {run.step_s * 1000:.3g} ms a step")
        else:
            plan = fitted(plan, [run], left_s(), chooses=asked.steps is None, rounds=RUNS + 1)
            usual_s = max(run_s(plan, [run]), run.wall_s)
    return ""


def _judged(
    result: GateResult,
    baseline: Baseline,
    now: Fingerprint,
    made: Sequence[MeasuredRun],
    asked: Asked,
    allow_mismatch: bool,
) -> GateResult:
    metric = asked.metric
    if metric is Metric.SAMPLES_PER_S and any(metric not in run.figures for run in made):
        metric = Metric.STEP_MS
    judgement = judge_by_history(baseline, made, metric, asked.max_drop)
    beside = tuple(
        judged
        for each in BESIDE
        if each is not metric
        and each in COMPARABLE
        and (judged := judge_by_history(baseline, made, each, asked.max_drop)) is not None
    )
    soft = tuple(f"not as before: {each}" for each in soft_mismatch(baseline, now))
    notes = (*result.notes, *soft)
    result = replace(result, metric=metric, judgement=judgement, beside=beside, notes=notes)
    other = mismatch(baseline, now)
    if other and not allow_mismatch:
        return replace(result, judgement=None, beside=(), causes=other, advice=UPDATE)
    if other:
        others = tuple(f"another machine or other work: {each}" for each in other)
        return replace(result, notes=(*others, *notes), causes=other, advice=UPDATE)
    if judgement is None and not any(metric in run.figures for run in made):
        return replace(
            result,
            verdict=Verdict.INCONCLUSIVE,
            causes=(f"{metric.label} could not be measured in this job", *causes(made)),
            advice=if_not_measured(metric),
        )
    if judgement is None:
        return replace(result, causes=(f"the baseline holds no {metric.label}",), advice=UPDATE)
    return _concluded(result, judgement, baseline, made)


def _concluded(
    result: GateResult, judgement: Judgement, baseline: Baseline, made: Sequence[MeasuredRun]
) -> GateResult:
    """Returns the result with the verdict of the judgement, and what follows from that."""
    result = replace(result, verdict=judgement.verdict)
    if judgement.verdict is Verdict.PASS:
        return replace(result, notes=(*result.notes, *_warning(judgement)))
    if judgement.verdict is Verdict.INCONCLUSIVE:
        return replace(result, causes=(judgement.reason, *causes(made)), advice=SIDE_BY_SIDE)
    result = replace(
        result,
        notes=(*filter(None, [judgement.against]), *result.notes),
        advice="To see lines and new faults, run both versions: diagnose gate --ab BASE..HEAD",
    )
    return explained(result, lambda _: explain_by_history(baseline, judgement, made))


def _warning(judgement: Judgement) -> tuple[str, ...]:
    """Says where the machine, not what is allowed, decides which drop is seen."""
    chance = DEVIATIONS * judgement.error
    if chance <= log_of(judgement.max_drop, judgement.metric):
        return ()
    seen = format_percent(drop_of(chance, judgement.metric))
    return (f"jobs on this kind of machine differ so much that only a drop of {seen} is beyond chance",)


def _usual_s(place: Path, command: tuple[str, ...], asked: Asked) -> float:
    """Returns what a run of the command took at most in earlier jobs, on any machine; else infinity."""
    took: list[float] = []
    for path in sorted(place.glob("*.json")) if place.is_dir() else [place]:
        with contextlib.suppress(DiagnoseError, OSError):
            baseline = load(path)
            if baseline.fingerprint.hard.get("command") == " ".join(command):
                took += [_rehearsal_s(entry, asked) for entry in baseline.entries]
    return max(took, default=math.inf)


def _rehearsal_s(entry: Entry, asked: Asked) -> float:
    step_s = entry.metrics.get(Metric.STEP_MS, 0.0) / 1000
    steps = (MIN_WARMUP if asked.warmup is None else asked.warmup) + (asked.steps or STEPS)
    return entry.metrics.get(Metric.STARTUP, 0.0) + steps * step_s


def _why_none(place: Path, path: Path, now: Fingerprint) -> tuple[str, ...]:
    """Says in what the nearest of the other baselines differs: most often a runner of another kind."""
    nearest: tuple[str, ...] = ()
    for other in sorted(place.glob("*.json")) if place.is_dir() else ():
        try:
            found = mismatch(load(other), now)
        except DiagnoseError:
            continue
        if not nearest or len(found) < len(nearest):
            nearest = tuple(f"{other.name} is of another machine or other work: {each}" for each in found)
    return (f"there is no baseline {path}", *nearest)
