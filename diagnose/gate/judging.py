"""Judges one metric by pairs of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from diagnose.gate.result import Judgement, MeasuredRun, Metric, Pair, Verdict
from diagnose.gate.statistics import MIN_PAIRS, Decision, State, decide, max_error
from diagnose.gate.steps import MIN_STEPS
from diagnose.gate.words import format_percent


def judge(pairs: Sequence[Pair], metric: Metric, max_drop: float, *, last: bool) -> Judgement | None:
    """Judges one metric by the pairs in which both runs have it.

    Returns:
        `None` without such a pair. The verdict is `INCONCLUSIVE` with a reason where the pairs cannot tell,
        and without one where more of them may.
    """
    both = [pair for pair in pairs if has_figure(pair, metric)]
    if not both:
        return None
    logs = [log_cost(pair, metric) for pair in both]
    limit = log_of(max_drop, metric)
    decision = decide(logs, limit, last=last)
    verdict = {State.PASS: Verdict.PASS, State.REGRESSION: Verdict.REGRESSION}
    return Judgement(
        metric=metric,
        verdict=verdict.get(decision.state, Verdict.INCONCLUSIVE),
        max_drop=max_drop,
        drop=drop_of(decision.estimate, metric),
        low=drop_of(decision.low, metric),
        high=drop_of(decision.high, metric),
        error=decision.error,
        detectable=drop_of(decision.detectable, metric),
        p=decision.p,
        pairs=decision.pairs,
        base=statistics.median(pair.base.figures[metric] for pair in both),
        head=statistics.median(pair.head.figures[metric] for pair in both),
        reason=_reason(decision, limit),
    )


def has_figure(pair: Pair, metric: Metric) -> bool:
    """Whether both runs of a pair have a metric."""
    return min(pair.base.figures.get(metric, 0.0), pair.head.figures.get(metric, 0.0)) > 0


def log_cost(pair: Pair, metric: Metric) -> float:
    """Returns the logarithm of what the head's work cost over the base's, of a pair that has the metric."""
    sign = -1.0 if metric.more_is_better else 1.0
    return sign * math.log(pair.head.figures[metric] / pair.base.figures[metric])


def log_of(drop: float, metric: Metric) -> float:
    """Returns a drop as the logarithm of the costs' ratio: 3 % fewer per second take 3.05 % more time."""
    return -math.log1p(-drop) if metric.more_is_better else math.log1p(drop)


def drop_of(log: float, metric: Metric) -> float:
    """The reverse of `log_of`."""
    return -math.expm1(-log) if metric.more_is_better else math.expm1(log)


def why_useless(run: MeasuredRun) -> str:
    """Says why no figure can be taken from a run; empty where one can."""
    if not run.figures:
        return f"no optimizer step was seen in {run.name} ({run.wall_s:.0f} s)"
    if run.num_steps < MIN_STEPS:
        return (
            f"{run.name} had {run.num_steps + run.warmup} steps; after a warm-up of {run.warmup}, "
            f"{MIN_STEPS} or more must be left to measure"
        )
    return ""


def _reason(decision: Decision, limit: float) -> str:
    if decision.state is not State.INCONCLUSIVE:
        return ""
    if decision.pairs < MIN_PAIRS:
        return f"{decision.pairs} pairs of runs; {MIN_PAIRS} are needed at least"
    if decision.error <= max_error(limit):
        return "the loss is larger than allowed, but may be chance"
    return (
        f"the pairs scatter too much: standard error {format_percent(decision.error)} after "
        f"{decision.pairs} pairs, {format_percent(max_error(limit))} is the most with which "
        "so little can be judged"
    )
