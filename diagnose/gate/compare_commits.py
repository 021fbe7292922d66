"""`diagnose gate --ab`: two versions, side by side, from worktrees to verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from diagnose.core.errors import DiagnoseError
from diagnose.gate.fingerprint import fingerprint_of
from diagnose.gate.imports import why_same_code
from diagnose.gate.in_turns import KEEPS_FREED
from diagnose.gate.judging import judge, log_of
from diagnose.gate.measure import RunPlan, measured_in_turns, measured_run
from diagnose.gate.noise import advice, causes
from diagnose.gate.pairs import (
    Asked,
    MeasurePair,
    MeasureRun,
    Paired,
    Progress,
    run_pairs,
    why_not_in_turns,
)
from diagnose.gate.ranks_read import of_ranks
from diagnose.gate.result import (
    Failure,
    GateResult,
    Judgement,
    MeasuredRun,
    Metric,
    Reason,
    Side,
    TrainingFailed,
    Verdict,
)
from diagnose.gate.sides import in_worktree
from diagnose.gate.statistics import is_certain
from diagnose.gate.worktrees import (
    inside_repository,
    note_of_submodules,
    refuse_working_copy,
    repository_of,
    resolve_range,
    uncommitted,
    worktrees,
)

Measure = Callable[[Side, str, Path, RunPlan], MeasuredRun]
MeasureInTurns = Callable[[Sequence[Side], Sequence[str], Path, RunPlan, float], list[MeasuredRun]]
Explain = Callable[[GateResult], tuple[Reason, ...]]

BESIDE = (
    Metric.CPU_MS,
    Metric.INSTRUCTIONS,
    Metric.MEAN_SAMPLES_PER_S,
    Metric.PEAK_MEMORY,
    Metric.PEAK_DEVICE_MEMORY,
)
"""Judged beside the metric asked for. Neighbours disturb the first two less than the clock."""

IN_TURNS = (
    "both versions ran at once, in turns, and kept the memory that they freed; steps in which one was "
    "stopped are left out, of the mean that time alone"
)

IN_RARE_STEPS = "a usual step is not slower: the loss is in rare ones, such as checkpoints"
IN_THE_MEAN = "of a usual step it cannot be told; with every stall the loss is certain"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRequest:
    """What to compare, and where to keep the runs.

    Attributes:
        asked: What to judge and how long to try.
        commits: `BASE..HEAD`; empty for two commands.
        commands: The training commands of base and head; the same one twice for two commits.
        links: Paths that git does not hold and both worktrees need.
        cwd: Where the user stands; the command runs in the same folder of each worktree.
        folder: Where the runs are kept.
    """

    asked: Asked
    commits: str = ""
    commands: tuple[tuple[str, ...], tuple[str, ...]]
    links: tuple[str, ...] = ()
    cwd: Path
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plumbing:
    """What a test may put in place of the real thing.

    Attributes:
        measure: Makes one run.
        measure_in_turns: Makes several at once.
        explain: Attributes a loss, while the worktrees still stand.
        progress: Told of each pair.
    """

    measure: Measure = measured_run
    measure_in_turns: MeasureInTurns = measured_in_turns
    explain: Explain | None = None
    progress: Progress = field(default=lambda text: None)


def compare_versions(request: GateRequest, plumbing: Plumbing | None = None) -> GateResult:
    """Runs both versions in turn and judges them.

    Raises:
        DiagnoseError: If the commits or the folders are not there.
    """
    plumbing = plumbing or Plumbing()
    with sigterm_unwinds():
        folder = inside_repository(request.cwd)

        def side(label: str, name: str, commit: str, command: tuple[str, ...]) -> Side:
            return Side(
                label=label, name=name, commit=commit, root=request.cwd, folder=folder, command=command
            )

        if not request.commits:
            named = zip(("base", "head"), request.commands, strict=True)
            sides = [side(label, " ".join(command), "", command) for label, command in named]
            same = len(set(request.commands)) == 1
            notes = ["both commands are the same: this measures the machine, not a change"] if same else []
            return _compared(request, sides, plumbing, tuple(notes))
        repository = repository_of(request.cwd)
        (base, base_hash), (head, head_hash) = resolve_range(repository, request.commits)
        notes = [note for note in (uncommitted(repository),) if note]
        if base_hash == head_hash:
            notes.append(f"{base} and {head} are the same commit: this measures the machine, not a change")
        notes += note_of_submodules(repository, base_hash, head_hash, request.links)
        with worktrees(repository, (base_hash, head_hash), request.links) as roots:
            for command in set(request.commands):
                refuse_working_copy(repository, command)
            sides = [
                side("base", base, base_hash, request.commands[0]),
                side("head", head, head_hash, request.commands[1]),
            ]
            moved = zip(sides, roots, strict=True)
            sides = [in_worktree(each, root, repository, asker="gate") for each, root in moved]
            return _compared(request, sides, plumbing, tuple(notes), repository)


def _compared(
    request: GateRequest,
    sides: Sequence[Side],
    plumbing: Plumbing,
    notes: tuple[str, ...],
    repository: Path | None = None,
) -> GateResult:
    begun = time.monotonic()
    made: list[MeasuredRun] = []
    if request.asked.in_turns:
        keeps = {name: os.environ.get(name, value) for name, value in KEEPS_FREED.items()}
        sides = [replace(side, environment={**keeps, **side.environment}) for side in sides]
        notes = (*notes, IN_TURNS)
    result = GateResult(
        verdict=Verdict.INCONCLUSIVE,
        metric=request.asked.metric,
        asked=request.asked.metric,
        max_drop=request.asked.max_drop,
        sides=tuple(sides),
        notes=notes,
        folder=request.folder,
    )
    try:
        paired = run_pairs(
            _measure(sides, plumbing.measure, request, made, repository),
            request.asked,
            progress=plumbing.progress,
            measure_pair=_measure_pair(sides, plumbing.measure_in_turns, request, made),
        )
    except TrainingFailed as error:
        return failed(result, error.failure, made, begun)
    result = _concluded(result, paired, sides[1])
    if result.verdict is Verdict.REGRESSION and plumbing.explain is not None:
        result = explained(result, plumbing.explain)
    return replace(result, wall_s=time.monotonic() - begun)


def explained(result: GateResult, explain: Explain) -> GateResult:
    """Returns the result with what its loss is attributed to."""
    try:
        return replace(result, why=explain(result))
    except Exception as error:  # noqa: BLE001 - a fault of ours in the reasons must not lose the verdict
        detail = traceback.format_exc(limit=-2).strip()
        note = f"the loss could not be attributed, a bug of ours: {type(error).__name__}\n{detail}"
        return replace(result, notes=(*result.notes, note))


def failed(result: GateResult, failure: Failure, made: Sequence[MeasuredRun], begun: float) -> GateResult:
    """Returns the result of a gate that began then, and whose training command failed after some runs."""
    wall_s = time.monotonic() - begun
    return replace(result, verdict=Verdict.FAILED, failure=failure, runs=tuple(made), wall_s=wall_s)


def _measure(
    sides: Sequence[Side],
    measure: Measure,
    request: GateRequest,
    made: list[MeasuredRun],
    repository: Path | None,
) -> MeasureRun:
    def run(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        measured = measure(sides[side], name, request.folder, plan)
        if repository is not None and len(made) < len(sides):  # the first of each
            reason = why_same_code(
                "gate", measured.folder, repository, sides[side].root, request.commits, request.links
            )
            if reason:
                raise DiagnoseError(reason)
        made.append(measured)
        return measured

    return run


def _measure_pair(
    sides: Sequence[Side], measure: MeasureInTurns, request: GateRequest, made: list[MeasuredRun]
) -> MeasurePair:
    def run(order: Sequence[int], names: Sequence[str], plan: RunPlan, turn_s: float) -> list[MeasuredRun]:
        measured = measure([sides[side] for side in order], names, request.folder, plan, turn_s)
        made.extend(measured)
        return measured

    return run


def _concluded(result: GateResult, paired: Paired, head: Side) -> GateResult:
    judgement = paired.judgement
    beside = tuple(
        judged
        for metric in BESIDE
        if metric is not judgement.metric
        and (judged := judge(paired.pairs, metric, result.max_drop, last=True)) is not None
    )
    notes = (*result.notes, *of_ranks(paired.runs), *_of_another_metric(result.metric, judgement))
    decisive, why = second_look(result.metric, paired)
    if why:
        beside = (judgement, *(each for each in beside if each.metric is not decisive.metric))
        judgement = decisive
        notes = (*notes, why)
    found = causes(paired.runs) if judgement.verdict is Verdict.INCONCLUSIVE else ()
    words: tuple[str, ...] = ()
    if judgement.verdict is Verdict.INCONCLUSIVE:
        words = tuple(filter(None, (paired.stopped or judgement.reason, *found)))
    print_ = fingerprint_of(paired.runs[-1].folder, head.command) if paired.runs else None
    return replace(
        result,
        verdict=judgement.verdict,
        metric=judgement.metric,
        judgement=judgement,
        pairs=paired.pairs,
        runs=paired.runs,
        beside=beside,
        causes=words,
        advice=advice(
            found,
            judgement.metric,
            beside,
            paired.stopped,
            may_take_turns=IN_TURNS not in result.notes
            and all(why_not_in_turns(run) == "" for run in paired.runs),
            not_measured=not judgement.pairs and not paired.stopped,
        )
        if words
        else "",
        notes=tuple(notes),
        fingerprint={"hard": print_.hard, "soft": print_.soft} if print_ is not None else {},
    )


def second_look(asked: Metric, paired: Paired) -> tuple[Judgement, str]:
    """Returns the judgement that counts, and why where that is not the one of a usual step's samples/s.

    The mean, which sees every stall, scatters more, so it alone seldom tells; where it does, it counts
    beside a usual step that passes, and, if it is certain, beside one that cannot be told. Where a run has
    nothing to be judged by, it does not.
    """
    usual = paired.judgement
    is_open = usual.verdict is Verdict.INCONCLUSIVE
    is_useless = bool(paired.stopped) and usual.reason == paired.stopped
    if asked is not Metric.SAMPLES_PER_S or usual.verdict is Verdict.REGRESSION or is_useless:
        return usual, ""
    mean = judge(paired.pairs, Metric.MEAN_SAMPLES_PER_S, usual.max_drop, last=True)
    if mean is None or mean.verdict is not Verdict.REGRESSION or (is_open and not _is_certain(mean)):
        return usual, ""
    return mean, IN_THE_MEAN if is_open else IN_RARE_STEPS


def _is_certain(loss: Judgement) -> bool:
    estimate, limit = (log_of(drop, loss.metric) for drop in (loss.drop, loss.max_drop))
    return is_certain(estimate, loss.error, limit)


def _of_another_metric(asked: Metric, judgement: Judgement) -> tuple[str, ...]:
    if asked is judgement.metric:
        return ()
    return (f"no batch size could be read, so {judgement.metric.label} is judged, not {asked.label}",)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP, by which CI systems cancel a job, end the gate as Ctrl-C does: tidily.

    One that is ignored, as nohup does, is meant to be.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
