"""Predicted against measured: what became of a run's findings in a later run."""

from __future__ import annotations

import time

from diagnose.analysis.recorders import is_untold, measured_otherwise
from diagnose.core.comparison import Change, Comparison, Unit
from diagnose.core.finding import Finding, Gain
from diagnose.core.prediction import Prediction
from diagnose.core.profile import Profile

MIN_LOST_SHARE = 0.05
"""Faults that cost less of the step together come and go with the noise between two runs."""


def prediction(before: Profile, after: Profile, comparison: Comparison) -> Prediction | None:
    """Sets what the first run's findings promised beside what the second run shows.

    Args:
        before: The first run, its rules asked.
        after: The second run, its rules asked.
        comparison: The two compared.

    Returns:
        `None` unless faults are gone, the script and its device are the same, and speeds were measured.
    """
    gone = gone_findings(before, after)
    lost_ns = sum(finding.fixed_ns_per_step for finding in gone)
    measured = measured_speedup(comparison.headline)
    same = all(
        getattr(before.run, name) == getattr(after.run, name) for name in ("script", "device", "world_size")
    )
    if not same or measured is None or lost_ns < MIN_LOST_SHARE * before.step_time_ns or not lost_ns:
        return None
    return Prediction(
        rules=tuple(finding.rule for finding in gone),
        predicted=Gain.of(
            before.step_time_ns,
            lost_ns=lost_ns,
            low_ns=min(lost_ns, sum(finding.low_ns for finding in gone)),
            high_ns=sum(finding.high_ns for finding in gone),
        ),
        measured=measured,
        measured_by=comparison.headline.name,
        before=_named(before),
        after=_named(after),
        noted_unix=time.time(),
    )


def gone_findings(before: Profile, after: Profile) -> tuple[Finding, ...]:
    """Returns findings of the first run that the second was asked about and does not have."""
    if after.num_rules is None:
        return ()
    still = {finding.rule for finding in after.findings} | {silent.rule for silent in after.abstained}
    otherwise = measured_otherwise(before, after)
    gone = (finding for finding in before.findings if finding.rule not in still)
    return tuple(finding for finding in gone if not is_untold(finding, otherwise))


def measured_speedup(change: Change) -> Gain | None:
    """Returns how much faster the second run was, as far as its noise lets it be told."""
    if not change.before or not change.after or change.noise is None:
        return None
    values = [change.after, change.after - change.noise, change.after + change.noise]
    if min(values) <= 0:
        return None
    if change.unit is Unit.PER_S:
        speedup, low, high = (value / change.before for value in values)
    else:
        speedup, high, low = (change.before / value for value in values)
    return Gain(speedup=speedup, low=low, high=high)


def _named(profile: Profile) -> str:
    return f"{profile.run.id} {profile.run.started}".rstrip()
