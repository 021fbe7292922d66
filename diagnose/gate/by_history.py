"""The verdict on a job by what earlier jobs of its kind of machine measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from diagnose.gate.baseline import RUNS, Baseline
from diagnose.gate.judging import drop_of, log_of
from diagnose.gate.result import Judgement, MeasuredRun, Metric, Verdict
from diagnose.gate.statistics import Z_95, Z_975
from diagnose.gate.words import format_percent

LEAST_ENTRIES = 10
"""Jobs below which their scatter is not known."""

DEVIATIONS = 3.7
"""Standard deviations between jobs that are within chance. Ten jobs do not tell how they scatter: with 3.5,
0.6 % of jobs on hosts that wander are false alarms.

Of the ordinary standard deviation: the one from the median absolute deviation is too small too often with
ten jobs (1.4 % false alarms instead of 0.5 %, `benchmarks/gate_simulation.py`)."""

NEAR = 2.0
"""A job passes only where a drop of so many times what is allowed would have been found."""

PARTS = 3
"""A job is also set beside the oldest and the newest of so many parts of the history."""

PARTS_FROM = 20
"""But only once there are so many jobs: of fewer, those of a machine that wanders look steady too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss beside a part of the history.

    Attributes:
        jobs: The part.
        grew: How much more the job costs than it, as a logarithm.
        against: The part, in words.
    """

    jobs: slice
    grew: float
    against: str


def judge_by_history(
    baseline: Baseline, runs: Sequence[MeasuredRun], metric: Metric, max_drop: float
) -> Judgement | None:
    """Judges a job by earlier ones.

    It passes, or loses, only where the scatter between jobs allows to say so: a drop that is larger than
    allowed and smaller than what the machine does by itself is neither. Where twice the allowed drop could
    go unseen, that none was seen is no pass. Where jobs are steady, it is set beside the oldest and the
    newest of them, too.

    Returns:
        `None` where no run, or no earlier job, has the metric.
    """
    earlier = [entry.metrics[metric] for entry in baseline.entries if metric in entry.metrics]
    figures = [run.figures[metric] for run in runs if metric in run.figures]
    if not earlier or not figures:
        return None
    sign = -1.0 if metric.more_is_better else 1.0
    logs = [sign * math.log(value) for value in earlier]
    now = sign * math.log(statistics.median(figures))
    estimate, base = now - statistics.median(logs), statistics.median(earlier)
    limit = log_of(max_drop, metric)
    count = len(logs)
    error = statistics.stdev(logs) * math.sqrt(1 + 1 / count) if count >= LEAST_ENTRIES else math.nan
    threshold = max(limit, DEVIATIONS * error)
    found = threshold + Z_95 * error
    line_error = error_beside_part(logs) if count >= PARTS_FROM else math.inf
    is_steady = DEVIATIONS * line_error <= limit
    if is_steady:
        found = min(found, limit + Z_95 * line_error)
    verdict, reason, against = Verdict.PASS, "", ""
    if count < LEAST_ENTRIES:
        verdict = Verdict.INCONCLUSIVE
        jobs = f"{count} job{'s' if count > 1 else ''}"
        reason = f"the baseline holds {jobs}; {LEAST_ENTRIES} are needed to know their scatter"
    elif len(figures) < RUNS:
        verdict = Verdict.INCONCLUSIVE
        reason = f"{len(figures)} of {RUNS} runs could be measured"
    elif estimate > threshold:
        verdict = Verdict.REGRESSION
    elif is_steady and (loss := loss_beside_part(logs, now, limit)) is not None:
        verdict, against = Verdict.REGRESSION, loss.against
        estimate, error, base = loss.grew, line_error, statistics.median(earlier[loss.jobs])
    elif estimate > limit:
        verdict = Verdict.INCONCLUSIVE
        reason = (
            "jobs on this kind of machine differ too much: only a drop of "
            f"{format_percent(drop_of(threshold, metric))} is beyond chance"
        )
    elif found > NEAR * limit and estimate + DEVIATIONS * error > limit:
        verdict = Verdict.INCONCLUSIVE
        reason = (
            "jobs on this kind of machine differ too much: a drop of up to "
            f"{format_percent(drop_of(found, metric))} could go unseen"
        )
    return Judgement(
        metric=metric,
        verdict=verdict,
        max_drop=max_drop,
        drop=drop_of(estimate, metric),
        low=drop_of(estimate - Z_975 * error, metric),
        high=drop_of(estimate + Z_975 * error, metric),
        error=error,
        detectable=drop_of(found, metric),
        pairs=count,
        base=base,
        head=statistics.median(figures),
        reason=reason,
        against=against,
    )


def loss_beside_part(logs: Sequence[float], now: float, limit: float) -> Loss | None:
    """Finds a loss beside the oldest or the newest jobs; for machines whose jobs are steady.

    A slow creep is one beside the oldest; back to where it was before a gain, one beside the newest.

    Args:
        logs: Logarithms of what earlier jobs cost, oldest first.
        now: That of the job.
        limit: The change that is allowed.
    """
    part = num_in_part(len(logs))
    for jobs, against in (
        (slice(-part, None), f"compared with the newest {part} of {len(logs)} jobs"),
        (
            slice(part),
            f"compared with the oldest {part} of {len(logs)} jobs: a slow creep, of code or machine",
        ),
    ):
        grew = now - statistics.median(logs[jobs])
        if grew > limit:
            return Loss(jobs=jobs, grew=grew, against=against)
    return None


def error_beside_part(logs: Sequence[float]) -> float:
    """Returns the error of a job beside a part of the history, by the scatter around a straight line.

    A slow creep widens the scatter of the whole history and so hides in it; this one it leaves as it is.
    On a machine that wanders it is too small, so it is believed only where what is allowed is far larger.
    """
    # The error of a median, for scatter without tails.
    return deviation_from_line(logs) * math.sqrt(1 + math.pi / 2 / num_in_part(len(logs)))


def num_in_part(count: int) -> int:
    """Returns how many of so many jobs are its oldest, or its newest."""
    return max(1, count // PARTS)


def deviation_from_line(values: Sequence[float]) -> float:
    """Returns the standard deviation of values, three or more, around the straight line through them."""
    slope, start = statistics.linear_regression(range(len(values)), values)
    squares = [(value - start - slope * number) ** 2 for number, value in enumerate(values)]
    return math.sqrt(math.fsum(squares) / (len(values) - 2))
