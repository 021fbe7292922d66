"""`diagnose gate --baseline`: one version against what earlier jobs measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.gate.baseline import RUNS, Baseline, file_for, judge_by_history, load, mismatch
from diagnose.gate.compare_commits import BESIDE, Plumbing, failed, sigterm_unwinds
from diagnose.gate.fingerprint import Fingerprint, differences, fingerprint_of
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.noise import advice, causes
from diagnose.gate.pairs import STEPS, Asked, fitted, why_useless
from diagnose.gate.ranks_read import of_ranks, why_other_ranks
from diagnose.gate.result import GateResult, MeasuredRun, Metric, Side, TrainingFailed, Verdict

UPDATE = "Record one, on the main branch: diagnose baseline update -- TRAINING COMMAND"


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
        max_drop=asked.max_drop,
        sides=(side,),
        folder=folder,
    )
    if not place.exists():
        return replace(result, causes=(f"there is no baseline {place}",), advice=UPDATE)
    made: list[MeasuredRun] = []
    try:
        with sigterm_unwinds():
            stopped = measure_job(side, asked, folder, plumbing, made)
    except TrainingFailed as failure:
        return replace(failed(result, failure), runs=tuple(made), wall_s=time.monotonic() - begun)
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


def measure_job(side: Side, asked: Asked, folder: Path, plumbing: Plumbing, made: list[MeasuredRun]) -> str:
    """Makes a rehearsal and the runs of a job, and adds the latter to `made`; says why it stopped early.

    Raises:
        TrainingFailed: If a run does not end well.
    """
    begun = time.monotonic()

    def left_s() -> float | None:
        return None if asked.budget_s is None else asked.budget_s - (time.monotonic() - begun)

    plan = RunPlan(steps=asked.steps or STEPS, warmup=asked.warmup or 0, finds_warmup=asked.warmup is None)
    first: MeasuredRun | None = None
    for number in range(RUNS + 1):
        try:
            run = plumbing.measure(side, f"head-{number:02d}", folder, replace(plan, timeout_s=left_s()))
        except OutOfTime:
            assert asked.budget_s is not None
            return f"the budget of {asked.budget_s / 60:g} min was used up by {number} runs"
        useless = why_useless(run) or why_other_ranks(first or run, run)
        if useless:
            return useless
        first = first or run
        if number:
            made.append(run)
            plumbing.progress(f"run {number} of {RUNS}: {run.step_s * 1000:.3g} ms a step")
        else:
            plan = fitted(plan, [run], asked, left_s())
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
        and (judged := judge_by_history(baseline, made, each, asked.max_drop)) is not None
    )
    soft = tuple(f"not as before: {each}" for each in differences(baseline.fingerprint.soft, now.soft))
    notes = (*result.notes, *soft)
    result = replace(result, metric=metric, judgement=judgement, beside=beside, notes=notes)
    other = mismatch(baseline, now)
    if other and not allow_mismatch:
        return replace(result, judgement=None, beside=(), causes=other, advice=UPDATE)
    if other:
        others = tuple(f"another machine or other work: {each}" for each in other)
        return replace(result, notes=(*others, *notes), causes=other, advice=UPDATE)
    if judgement is None:
        return replace(result, causes=(f"the baseline holds no {metric.label}",), advice=UPDATE)
    if judgement.verdict is not Verdict.INCONCLUSIVE:
        return replace(result, verdict=judgement.verdict)
    found = causes(made)
    return replace(
        result,
        verdict=Verdict.INCONCLUSIVE,
        causes=(judgement.reason, *found),
        advice="Compare in one job instead, where machines do not differ: diagnose gate --ab BASE..HEAD",
    )


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
