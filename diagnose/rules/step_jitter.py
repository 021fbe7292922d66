"""Some steps take far longer than the others, and nothing explains them"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._cpus import machine_share
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_SHARE = 0.05
"""Outliers that take less are what any machine has."""

MOST_SPIKES = 0.15
"""More outliers than this are no outliers, but steps of another kind: longer batches, for example."""

LEAST_SPIKES = 5
"""Fewer may be one event of the machine."""

LEAST_NS = 5_000_000_000
"""A shorter run has been seen too briefly to tell outliers from what the machine does at times."""

MOST_DELAY = 0.5
"""If the threads that compute waited for a CPU for this part of the outliers' time, or other guests of the
machine's host had theirs, the machine explains them."""

BY_TOKENS = 0.7
"""Where the time of a step goes so closely with its tokens, these explain half of how it varies."""

COMPUTING = (Phase.COPY, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)

RARE = Series(spike_ns={Phase.FORWARD: 8e6}, spike_share={Phase.FORWARD: 0.02}, period={})
QUIET = HostStats(runnable_share=0.001)


class StepJitter(Rule):
    """
    ## What it means
    A few steps take far longer than the rest, at no regular interval, while the model computes.
    Collections, checkpoints, evaluations, data and other programs were looked at and do not explain them,
    nor do waits of torch's threads for a CPU, or what other guests of a virtual machine's host took.

    ## What to do
    Look at what else these steps do: inputs of another size, memory that is allocated anew, the clock of
    the processor, a network file system. The steps' times are in the run's file.

    ## When it is wrong
    Inputs whose size varies greatly have steps whose time does. A virtual machine may stand still without
    telling its guests: run the script on another machine, and see whether it has these steps there.
    """

    needs = ("host.runnable_share",)
    residual = True
    fires_on = (
        profile(series=RARE, host=QUIET),
        profile(
            series=Series(spike_ns={Phase.FORWARD: 20e6}, spike_share={Phase.FORWARD: 0.05}),
            host=HostStats(num_threads=2, runnable_share=0.02, native_delay_share=0.03, stolen_cpus=0.04),
        ),
    )
    silent_on = (
        profile(host=QUIET),
        profile(series=RARE, host=HostStats(runnable_share=0.08)),
        profile(series=replace(RARE, by_tokens=0.9), host=QUIET),
        profile(series=RARE, host=HostStats(num_threads=2, runnable_share=0.02, native_delay_share=0.06)),
        profile(series=RARE, host=HostStats(runnable_share=0.02, stolen_cpus=0.06)),
        profile(
            series=Series(spike_ns={Phase.FORWARD: 20e6}, spike_share={Phase.FORWARD: 0.3}), host=QUIET
        ),
        profile(
            series=Series(spike_ns={Phase.CHECKPOINT: 20e6}, spike_share={Phase.CHECKPOINT: 0.02}),
            host=QUIET,
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        series, delay = profile.series, machine_share(profile.host)
        if series.by_tokens is not None and series.by_tokens >= BY_TOKENS:
            return None  # long sequences take long
        spiking = [
            phase
            for phase in COMPUTING
            if phase not in series.period
            and series.spike_share.get(phase, 0.0) * profile.steps.measured >= LEAST_SPIKES
            and series.spike_share[phase] <= MOST_SPIKES
        ]
        lost = {phase: min(series.spike_ns[phase], profile.spent_ns(phase)) for phase in spiking}
        total = sum(lost.values())
        share = total / profile.step_time_ns
        if share < MIN_SHARE or delay > MOST_DELAY * share or profile.steps.total_time_ns < LEAST_NS:
            return None
        worst = max(lost, key=lambda phase: lost[phase])
        each_ns = series.each_ns(worst)
        assert each_ns is not None
        return Finding(
            rule=self.name,
            summary=f"A few steps take far longer than the rest: {format_share(share)} of the time",
            lost_ns={phase: ns for phase, ns in lost.items() if ns},
            low_ns=0.0,
            high_ns=total,
            assumption="the long steps could be as short as the others",
            evidence=(
                f"{format_share(series.spike_share[worst])} of the steps take {format_ms(each_ns)} more"
                f" than usual in {worst.label}, at no regular interval.",
                f"The threads that compute waited for a CPU for {format_share(delay)} of the time only.",
            ),
            fix="Look at what the long steps have in common: the size of their inputs first.",
        )
