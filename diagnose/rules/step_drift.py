"""Steps take longer and longer"""

from __future__ import annotations

from collections.abc import Mapping

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, named
from diagnose.rules.base import Rule

MIN_SHARE = 0.03
"""Growth that has cost less so far can be the machine's."""

QUARTERS_APART = 3 / 4
"""Part of the measured steps that lies between the middles of their first and last quarter."""

MAIN_SHARE = 0.6
"""What grows in the script grows in one phase, or in a few, as a hook of a module does that is called with
gradients and without; a machine that slows down slows all of them."""

ALIKE = 0.5
"""Phases that grow by this part of what the worst grows by, each as a part of itself, grow with it."""

STEADY_SHARE = 0.3
"""Part of the step that others of these take at least, where several grow: they show the machine's speed,
which waiting does not."""

COMPUTING = {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION, Phase.OTHER}

BOUNDS = (0.6, 1.4)
"""Growth is seldom even."""

ONLY_OF = {"checkpoint-stall": {"save"}, "slow-optimizer": {"python-loop", "update"}}
"""Rules whose lines must do such things to be what grows: beside a save, or an optimizer of torch's,
something else in the same phase may."""


class StepDrift(Rule):
    """
    ## What it means
    Each quarter of the run was slower than the one before, in one phase: something grows with the steps. A
    list that is walked each time, a graph that is never freed, a file that is read again from its start.

    ## What to do
    Look at what the growing phase's line keeps: append, but do not walk; `detach()` what is kept of losses
    and outputs; keep a window instead of the whole history.

    ## When it is wrong
    Curricula that make the inputs longer on purpose.
    """

    explains = (
        "blocking-call",
        "checkpoint-stall",
        "epoch-boundary-stall",
        "frequent-evaluation",
        "gc-pauses",
        "host-sync",
        "logging-io",
        "python-overhead",
        "repeated-preparation",
        "serial-loading",
        "slow-batch-building",
        "slow-clipping",
        "slow-collate",
        "slow-ema",
        "slow-metrics",
        "slow-optimizer",
        "slow-rollout",
        "slow-samples",
        "slow-scheduler",
        "slow-storage",
        "slow-transform",
    )
    fires_on = (
        profile(
            other_ms=20,
            series=Series(drift_ns={Phase.OTHER: 15e6}),
            where=(at("mean = sum(history) / len(history)", 0.19, "python-loop"),),
        ),
        profile(series=Series(drift_ns={Phase.BACKWARD: 6e6, Phase.FORWARD: 1e6})),
        profile(evaluation_ms=25, series=Series(drift_ns={Phase.EVALUATION: 6e6, Phase.FORWARD: 6e6})),
    )
    silent_on = (
        profile(),
        profile(series=Series(drift_ns={Phase.BACKWARD: 4e6})),
        profile(series=Series(drift_ns={Phase.BACKWARD: 9e6, Phase.FORWARD: 9e6})),
        profile(
            evaluation_ms=25,
            series=Series(drift_ns={Phase.EVALUATION: 6e6, Phase.FORWARD: 6e6, Phase.BACKWARD: 9e6}),
        ),
    )

    def explained(self, finding: Finding, profile: Profile) -> tuple[str, ...]:
        """See `Rule.explained`. What the line does that grows decides of some."""
        does: set[str] = set()
        for line in profile.where:
            if (line.file, line.line) == (finding.file, finding.line) and line.phase in finding.lost_ns:
                does.update(line.idiom, ("save",) if line.phase is Phase.CHECKPOINT else ())
        return tuple(name for name in self.explains if name not in ONLY_OF or does & ONLY_OF[name])

    def check(self, profile: Profile) -> Finding | None:
        drift = {phase: ns for phase, ns in profile.series.drift_ns.items() if ns > 0}
        if not drift:
            return None
        worst = max(drift, key=lambda phase: drift[phase])
        growing = _growing(profile, drift, worst)
        # Even growth, from the run's first step on: what the warm-up had grown by then is lost, too.
        before, measured = profile.steps.warmup, profile.steps.measured
        lost_of_growth = (before + measured / 2) / (QUARTERS_APART * measured)
        lost = {phase: min(lost_of_growth * drift[phase], profile.spent_ns(phase)) for phase in growing}
        lost_ns, grown_ns = sum(lost.values()), sum(drift[phase] for phase in growing)
        if lost_ns < MIN_SHARE * profile.step_time_ns or grown_ns < MAIN_SHARE * sum(drift.values()):
            return None
        where = " and ".join(phase.label for phase in growing)
        line = next((line for line in profile.where if line.phase is worst and not line.in_worker), None)
        evidence = [
            f"The usual {where} took {format_ms(grown_ns)} more in the run's last quarter than"
            " in its first, and grew from each quarter to the next."
        ]
        if line is not None:
            evidence.append(f"Most of its time is in {named(line)}, {line.function}.")
        return Finding(
            rule=self.name,
            summary=f"Steps grow longer: {format_ms(grown_ns)} more {where} at the end, so far"
            f" {format_share(lost_ns / profile.step_time_ns)} of the time, and more with each step",
            lost_ns=lost,
            low_ns=BOUNDS[0] * lost_ns,
            high_ns=BOUNDS[1] * lost_ns,
            assumption="steps could stay as short as the first ones",
            evidence=tuple(evidence),
            fix=f"Find what grows in the {worst.label}: keep a window instead of the whole history, and"
            " detach() what is kept of losses.",
            file=line.file if line else "",
            line=line.line if line else 0,
        )


def _growing(profile: Profile, drift: Mapping[Phase, float], worst: Phase) -> tuple[Phase, ...]:
    """Returns the phases that grow with the one that grows most, that one first; alone it is where too
    little of the step would be left to show that the machine is as fast as before."""

    def grown(phase: Phase) -> float:
        return drift.get(phase, 0.0) / max(1.0, profile.spent_ns(phase))

    with_it = [phase for phase in drift if phase is not worst and grown(phase) >= ALIKE * grown(worst)]
    steady_ns = sum(profile.spent_ns(phase) for phase in COMPUTING - {worst, *with_it})
    return (worst, *with_it) if steady_ns >= STEADY_SHARE * profile.step_time_ns else (worst,)
