"""Which phases of a step grew since earlier jobs: all that a baseline keeps to tell a loss by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from diagnose.analysis.profile import load_series
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS, format_share
from diagnose.gate.attribution import ALIKE, MIN_ALIKE, MIN_PART, WEIGHTY_SHARE
from diagnose.gate.baseline import Baseline
from diagnose.gate.by_history import DEVIATIONS, deviation_from_line, num_in_part
from diagnose.gate.cause import Growth, PhaseGrowth
from diagnose.gate.result import Judgement, MeasuredRun, Reason
from diagnose.gate.steps import usual_phases
from diagnose.gate.why import OF_STEPS, phase_words

LEAST_KNOWN = 5
"""Jobs whose phases must be known for their scatter to be."""


def phase_times(runs: Sequence[MeasuredRun]) -> dict[Phase, float]:
    """Returns the milliseconds per step that each phase usually took: medians over the runs of a job.

    Of several ranks the first is read. A phase that a run did not have took no time in it.
    """
    of_runs = [usual_phases(load_series(run.folder)) for run in runs]
    if not all(of_runs):
        return {}
    phases = [phase for phase in Phase if any(phase in times for times in of_runs)]
    return {
        phase: statistics.median(times.get(phase, 0.0) for times in of_runs) / NS_PER_MS for phase in phases
    }


def explain_by_history(
    baseline: Baseline, judgement: Judgement, runs: Sequence[MeasuredRun]
) -> tuple[Reason, ...]:
    """Attributes a loss to the phases that took longer than in the jobs that it was found beside."""
    if judgement.metric not in OF_STEPS:
        return (_reason(f"{judgement.metric.label} is not time of the steps: no phase can explain it"),)
    now = phase_times(runs)
    known = [entry.phase_ms for entry in baseline.entries if entry.phase_ms]
    if len(known) < LEAST_KNOWN or not now:
        words = f"{len(known)} of {len(baseline.entries)} jobs in the baseline tell what each phase took"
        return (_reason(f"cannot tell which phase lost the time: {words}; {LEAST_KNOWN} are needed"),)
    growths = [
        _growth([times.get(phase, 0.0) for times in known], now.get(phase, 0.0), judgement.against)
        for phase in Phase
    ]
    total = sum(growth.ns for growth in growths)
    found = [
        PhaseGrowth(phase=phase, growth=growth, part=growth.ns / total if total > 0 else 0.0)
        for phase, growth in zip(Phase, growths, strict=True)
    ]
    return tuple(_reasons(sorted(found, key=lambda each: -each.growth.ns)))


def _growth(earlier: Sequence[float], now: float, against: str) -> Growth:
    """By how much a phase took longer than in the jobs that the loss was found beside; milliseconds in."""
    part = num_in_part(len(earlier)) if against else len(earlier)
    beside = earlier[:part] if "oldest" in against else earlier[-part:]
    before = statistics.median(beside)
    error = deviation_from_line(earlier) * math.sqrt(1 + math.pi / 2 / part)
    low, high = (now - before + sign * DEVIATIONS * error for sign in (-1, 1))
    return Growth(
        before_ns=before * NS_PER_MS,
        ns=(now - before) * NS_PER_MS,
        low_ns=low * NS_PER_MS,
        high_ns=high * NS_PER_MS,
    )


def _reasons(phases: Sequence[PhaseGrowth]) -> Iterator[Reason]:
    step_ns = sum(each.growth.before_ns for each in phases)
    weighty = [each for each in phases if each.growth.before_ns >= WEIGHTY_SHARE * step_ns]
    parts = [each.growth.ns / each.growth.before_ns for each in weighty]
    if len(weighty) >= MIN_ALIKE and 0 < max(parts) <= ALIKE * min(parts):
        yield _reason(
            f"every phase of weight took {format_share(min(parts))} to {format_share(max(parts))} longer "
            "than in earlier jobs: the machine, or the process as a whole, not one part of the code",
            sum(each.part for each in weighty),
        )
        return
    named = [each for each in phases if each.growth.is_certain and each.part >= MIN_PART]
    if not named:
        yield _reason("cannot tell which phase lost the time: none grew by more than jobs differ anyway")
    for each in named:
        yield _reason(phase_words(each), each.part)


def _reason(text: str, part: float | None = None) -> Reason:
    return Reason(kind="phase", text=text, lost_share=part)
