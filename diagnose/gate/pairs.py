"""Runs of base and head, one after the other or both at once, until they tell or the time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from diagnose.core.errors import DiagnoseError
from diagnose.gate.fitting import STEPS, fitted, run_s
from diagnose.gate.in_turns import TURN_S, TURN_STEPS
from diagnose.gate.judging import judge, why_useless
from diagnose.gate.measure import OutOfTime, RunPlan
from diagnose.gate.patience import SUSPECT, hang, not_ended, time_limit
from diagnose.gate.ranks_read import why_other_ranks
from diagnose.gate.result import Failure, Judgement, MeasuredRun, Metric, Pair, TrainingFailed, Verdict
from diagnose.gate.statistics import FEW_PAIRS, MAX_PAIRS, MIN_PAIRS
from diagnose.gate.words import change

CERTAINLY = 0.75
"""What a run takes may turn out to be this part of what the rehearsals showed."""

BASE, HEAD = 0, 1
NAMES = ("base", "head")

MeasureRun = Callable[[int, str, RunPlan], MeasuredRun]
"""Makes one run of the base (0) or the head (1), under a name, by a plan."""

MeasurePair = Callable[[Sequence[int], Sequence[str], RunPlan, float], list[MeasuredRun]]
"""Makes runs at once: of which sides, the first one first, under which names, by a plan, in turns of so
many seconds."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user wants judged.

    Attributes:
        metric: The metric; samples/s becomes the step time where no batch size can be read.
        max_drop: The drop that is still allowed.
        steps: Steps to measure in each run; `None` to choose.
        warmup: Leading steps to leave out; `None` to find how many.
        budget_s: Time for all runs together; infinite for as long as it takes.
        max_pairs: Pairs to make at most.
        in_turns: Whether the runs of a pair are made at once, in turns of a moment.
    """

    metric: Metric = Metric.SAMPLES_PER_S
    max_drop: float = 0.03
    steps: int | None = None
    warmup: int | None = None
    budget_s: float = math.inf
    max_pairs: int = MAX_PAIRS
    in_turns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """What the pairs came to.

    Attributes:
        runs: All runs in order, with the two rehearsals and any run whose partner was never made.
        stopped: Why no further pair was made, where the pairs do not suffice.
    """

    pairs: tuple[Pair, ...]
    runs: tuple[MeasuredRun, ...]
    judgement: Judgement
    stopped: str = ""


def run_pairs(
    measure: MeasureRun,
    asked: Asked,
    *,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = lambda text: None,
    measure_pair: MeasurePair | None = None,
) -> Paired:
    """Makes pairs in the order base, head, head, base, so that a drift of the machine favours neither.

    Before them one rehearsal of each, which is not judged: it shows the warm-up and the length of a step,
    and fills the caches of files, byte code and compilers.

    Raises:
        TrainingFailed: If a run does not end well, or hangs.
        DiagnoseError: If the runs of a pair cannot be made at once, which was asked for.
    """
    job = _Job(measure=measure, asked=asked, clock=clock, begun=clock())
    plan = RunPlan(steps=asked.steps or STEPS, warmup=asked.warmup or 0, finds_warmup=asked.warmup is None)
    pairs: list[Pair] = []
    metric, judgement, stopped = asked.metric, None, ""
    try:
        rehearsals = [job.run(BASE, 0, plan)]
        rehearsals.append(job.run(HEAD, 0, plan, usual_s=rehearsals[0].wall_s))
        metric = _judged_metric(metric, rehearsals)
        plan = fitted(plan, rehearsals, job.left_s(), chooses=asked.steps is None)
        usual_s = run_s(plan, rehearsals)
        pairs_in_time = job.pairs_in_time(min(usual_s, *(run.wall_s for run in rehearsals)))
        progress(_progress_of_plan(plan, usual_s, pairs_in_time))
        if pairs_in_time < CERTAINLY * FEW_PAIRS:
            raise _Stopped(too_little_time(asked, usual_s))
        if asked.in_turns:
            _refuse_turns(rehearsals)
        turn_s = max(TURN_S, TURN_STEPS * max(run.step_s for run in rehearsals))
        while len(pairs) < asked.max_pairs:
            number = len(pairs) + 1
            order = (BASE, HEAD) if number % 2 else (HEAD, BASE)
            if asked.in_turns and measure_pair is not None:
                made = job.run_at_once(measure_pair, order, number, plan, turn_s, usual_s=2 * usual_s)
            else:
                made = {side: job.run(side, number, plan, usual_s=usual_s) for side in order}
            pairs.append(Pair(base=made[BASE], head=made[HEAD], base_first=order[0] == BASE))
            judgement = judge(pairs, metric, asked.max_drop, last=number == asked.max_pairs)
            progress(_progress(judgement, number))
            if judgement is None or judgement.verdict is not Verdict.INCONCLUSIVE or judgement.reason:
                break
    except _Stopped as stop:
        stopped = str(stop)
        judgement = judge(pairs, metric, asked.max_drop, last=True)
        if judgement is not None and isinstance(stop, _Useless):
            judgement = replace(judgement, verdict=Verdict.INCONCLUSIVE, reason=stopped)
    if judgement is None:
        judgement = Judgement(
            metric=metric,
            verdict=Verdict.INCONCLUSIVE,
            max_drop=asked.max_drop,
            reason=stopped or f"{metric.label} could not be measured",
        )
    return Paired(pairs=tuple(pairs), runs=tuple(job.runs), judgement=judgement, stopped=stopped)


class _Stopped(Exception):
    """No further run is worth making; says why."""


class _Useless(_Stopped):
    """A run has nothing to be judged by, and what the others say is not all that is to say."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """The runs made so far, and the time that is left for others."""

    measure: MeasureRun
    asked: Asked
    clock: Callable[[], float]
    begun: float
    runs: list[MeasuredRun] = field(default_factory=list)

    def left_s(self) -> float:
        return self.asked.budget_s - (self.clock() - self.begun)

    def pairs_in_time(self, usual_s: float) -> float:
        """Returns how many pairs of runs, each of which takes so long, there is time for."""
        left_s = self.left_s()
        return left_s / (2 * usual_s) if math.isfinite(left_s) else math.inf

    def run(self, side: int, number: int, plan: RunPlan, usual_s: float = math.inf) -> MeasuredRun:
        """Makes a run.

        Args:
            side: Of which version.
            number: Of its pair; 0 for a rehearsal.
            plan: How long it is.
            usual_s: What such a run takes, as far as that is known.
        """
        name = f"{NAMES[side]}-{number:02d}"
        like = counted(self.runs) if number else self.runs
        (run,) = self._made(
            lambda limit_s: [self.measure(side, name, replace(plan, timeout_s=limit_s))],
            name,
            max((run.wall_s for run in like), default=usual_s if number else 0.0),
            usual_s,
        )
        return run

    def run_at_once(
        self,
        measure: MeasurePair,
        order: Sequence[int],
        number: int,
        plan: RunPlan,
        turn_s: float,
        usual_s: float,
    ) -> dict[int, MeasuredRun]:
        """Makes the runs of a pair, which together take what is usual; returns them by their side."""
        names = [f"{NAMES[side]}-{number:02d}" for side in order]
        runs = self._made(
            lambda limit_s: measure(order, names, replace(plan, timeout_s=limit_s), turn_s),
            " and ".join(names),
            usual_s,
            usual_s,
        )
        return dict(zip(order, runs, strict=True))

    def _made(
        self,
        make: Callable[[float], list[MeasuredRun]],
        name: str,
        least_s: float,
        usual_s: float,
    ) -> list[MeasuredRun]:
        left_s = self.left_s()
        if left_s < least_s:
            raise _Stopped(used_up(self.asked, len(self.runs)))
        try:
            made = make(time_limit(usual_s, left_s))
        except OutOfTime as late:
            hangs = hang(name, usual_s, left_s, late)
            if hangs is None and left_s > SUSPECT * usual_s:
                raise _Useless(not_ended(name, left_s, usual_s)) from late
            raise hangs or _Stopped(used_up(self.asked, len(self.runs))) from late
        self.runs += made
        for run in made:
            useless = why_useless(run) or why_other_ranks(self.runs[0], run)
            if useless and not run.figures and run.name.startswith(NAMES[HEAD]):
                base = self.runs[0]
                raise never_trained(run, f"{base.name} did {base.warmup + base.num_steps}")
            if useless:
                raise _Useless(useless)
        return made


def never_trained(run: MeasuredRun, before: str) -> TrainingFailed:
    """Returns the exception that says of a head's run that it ended well, and did no step."""
    reason = f"no optimizer step was seen in {run.name}, where {before}"
    return TrainingFailed(Failure(run=run.name, reason=reason, exit_code=0))


def counted(runs: Sequence[MeasuredRun]) -> Sequence[MeasuredRun]:
    """Returns the runs of pairs: without the two rehearsals, whose length is another."""
    return runs[2:]


def why_not_in_turns(run: MeasuredRun) -> str:
    """Says why a run cannot be stopped and go on as if nothing had been; empty where it can."""
    if run.device != "cpu":
        return f"this one uses {run.device}, which works on while the process is stopped"
    if len(run.ranks) + len(run.missing_ranks) > 1:
        return "this one is of several ranks"
    return ""


def _refuse_turns(runs: Sequence[MeasuredRun]) -> None:
    for run in runs:
        reason = why_not_in_turns(run)
        if reason:
            raise DiagnoseError(f"gate: --in-turns is for one process on CPUs: {reason}.")


def too_little_time(asked: Asked, usual_s: float) -> str:
    """Says that no verdict could come of the pairs that the budget has time for."""
    return (
        f"at {usual_s:.0f} s a run, not even {FEW_PAIRS} pairs fit into the rest of the budget of "
        f"{asked.budget_s / 60:g} min; {MIN_PAIRS} are needed to tell a small loss"
    )


def used_up(asked: Asked, num_runs: int) -> str:
    """Says that the budget is over, and after how many runs."""
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    return f"the budget of {asked.budget_s / 60:g} min was used up by {runs}"


def _judged_metric(metric: Metric, runs: Sequence[MeasuredRun]) -> Metric:
    """Returns the metric, or what stands in for it where no batch size can be read.

    Raises:
        _Useless: If it can be read in one version alone: their steps may be of different batches.
    """
    if metric is not Metric.SAMPLES_PER_S:
        return metric
    without = [run.name for run in runs if metric not in run.figures]
    known = [run.name for run in runs if metric in run.figures]
    if without and known:
        raise _Useless(f"a batch size could be read in {known[0]} and not in {without[0]}")
    return Metric.STEP_MS if without else metric


def _progress(judgement: Judgement | None, number: int) -> str:
    if judgement is None:
        return f"pair {number}: not measured"
    return f"pair {number}: {change(judgement)}"


def _progress_of_plan(plan: RunPlan, usual_s: float, pairs_in_time: float) -> str:
    most = int(max(1, min(MAX_PAIRS, pairs_in_time)))
    pairs = f"{MIN_PAIRS} to {most} pairs" if most > MIN_PAIRS else f"time for {most} pairs"
    return f"warm-up {plan.warmup} steps, then {plan.steps} measured, about {usual_s:.0f} s a run; {pairs}"
