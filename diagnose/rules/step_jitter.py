"""Some steps take far longer than the others, and nothing explains them"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Loader, Program
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._cpus import machine_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, named, share_of
from diagnose.rules._own_code import irregular_batches, irregular_lines
from diagnose.rules.base import Rule

MIN_SHARE = 0.05
"""Outliers that take less are what any machine has."""

MOST_SPIKES = 0.15
"""More outliers than this are no outliers, but steps of another kind: longer batches, for example."""

MOST_RARE = 0.25
"""Likewise where a line of the loop takes hardly any time in the other steps: it runs now and then."""

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
RARE_OTHER = Series(spike_ns={Phase.OTHER: 18e6}, spike_share={Phase.OTHER: 0.1}, period={})
SETTLES = at("nearest = torch.cdist(seen, centres).argmin(1)", 0.18)
RARE_OWN = profile(other_ms=20, series=RARE_OTHER, host=QUIET, where=(replace(SETTLES, irregular=0.17),))
RARE_SCORE = replace(RARE_OWN, where=(replace(SETTLES, irregular=0.17, idiom=("metric",)),))
RARE_WAIT = Series(spike_ns={Phase.DATA_WAIT: 18e6}, spike_share={Phase.DATA_WAIT: 0.1}, period={})
RARE_BATCH = profile(
    data_wait_ms=20,
    series=RARE_WAIT,
    host=QUIET,
    where=(replace(SETTLES, phase=Phase.DATA_WAIT, irregular=0.17),),
)
MAX_LINES = 3


class StepJitter(Rule):
    """
    ## What it means
    A few steps take far longer than the rest, at no regular interval, while the model computes, or in code
    of the loop's own that takes hardly any time in the others. Collections, checkpoints, evaluations, data
    and other programs were looked at and do not explain them, nor do waits of torch's threads for a CPU, or
    what other guests of a virtual machine's host took.

    ## What to do
    Where a line of the loop is named, see when it runs, and whether it can be done elsewhere, or a part of
    it in each step. Else look at what else these steps do: inputs of another size, memory that is allocated
    anew, the clock of the processor, a network file system. The steps' times are in the run's file.

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
        RARE_BATCH,
        replace(RARE_BATCH, program=Program(loaders=(Loader(num_workers=0),))),
        RARE_SCORE,
        RARE_OWN,
    )
    silent_on = (
        profile(host=QUIET),
        profile(other_ms=20, series=RARE_OTHER, host=QUIET, where=(SETTLES,)),
        profile(other_ms=20, series=RARE_OTHER, host=QUIET),
        replace(RARE_OWN, series=replace(RARE_OTHER, period={Phase.OTHER: 10})),
        replace(RARE_OWN, where=(replace(SETTLES, irregular=0.17, every="step % 10 == 0"),)),
        replace(RARE_OWN, where=(replace(SETTLES, irregular=0.17, idiom=("log",)),)),
        replace(RARE_BATCH, where=(replace(SETTLES, phase=Phase.DATA_WAIT),)),
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
        lost = long_steps_ns(profile)
        if not lost:
            return None
        series, delay = profile.series, machine_share(profile.host)
        total = sum(lost.values())
        share = total / profile.step_time_ns
        worst = max(lost, key=lambda phase: lost[phase])
        each_ns = series.each_ns(worst)
        assert each_ns is not None
        lines = _rare_lines(profile).get(worst, ())[:MAX_LINES]
        where = "code of the loop's own" if lines else worst.label
        return Finding(
            rule=self.name,
            summary=f"A few steps take far longer than the rest: {format_share(share)} of the time",
            lost_ns=lost,
            low_ns=0.0,
            high_ns=total,
            assumption="the long steps could be as short as the others",
            evidence=(
                f"{format_share(series.spike_share[worst])} of the steps take {format_ms(each_ns)} more"
                f" than usual in {where}, at no regular interval.",
                f"The threads that compute waited for a CPU for {format_share(delay)} of the time only.",
                *(
                    f"In these steps {named(line)}, {line.function}, takes"
                    f" {format_share(line.share)} of the whole time."
                    for line in lines
                ),
            ),
            fix=f"See when {named(lines[0])} runs, and do it elsewhere, or a part of it in each step."
            if lines
            else "Look at what the long steps have in common: the size of their inputs first.",
            file=lines[0].file if lines else "",
            line=lines[0].line if lines else 0,
        )


def long_steps_ns(profile: Profile) -> dict[Phase, float]:
    """Returns what a few long steps take more than the others, in nanoseconds per step by phase; empty
    where that is nothing to speak of, is known to come of the machine or the inputs, or cannot be told.

    Between the phases it is what lines of the loop's own code take in such steps: others have rules of
    their own. It is told alone, or not at all: what computes is long for other reasons, and may be another
    rule's time.
    """
    series, host = profile.series, profile.host
    if host.runnable_share is None:
        return {}  # the rule abstains, and takes no time over from others
    if series.by_tokens is not None and series.by_tokens >= BY_TOKENS:
        return {}  # long sequences take long
    own_ns = {p: share_of(lines) * profile.step_time_ns for p, lines in _rare_lines(profile).items()}
    spiking = [
        phase
        for phase in (*COMPUTING, *own_ns)
        if phase not in series.period
        and series.spike_share.get(phase, 0.0) * profile.steps.measured >= LEAST_SPIKES
        and series.spike_share[phase] <= (MOST_RARE if phase in own_ns else MOST_SPIKES)
    ]
    lost = {phase: min(series.spike_ns[phase], profile.spent_ns(phase)) for phase in spiking}
    lost |= {phase: min(lost[phase], ns) for phase, ns in own_ns.items() if phase in lost}
    all_ns, least_ns = sum(lost.values()), MIN_SHARE * profile.step_time_ns
    delay_ns = machine_share(host) * profile.step_time_ns
    if delay_ns > MOST_DELAY * all_ns or profile.steps.total_time_ns < LEAST_NS:
        return {}
    own = max(own_ns.keys() & lost.keys(), key=lost.__getitem__, default=None)
    if own is not None and lost[own] >= max(least_ns, *lost.values()):
        return {own: lost[own]}
    lost = {phase: ns for phase, ns in lost.items() if phase in COMPUTING}
    return {phase: ns for phase, ns in lost.items() if ns} if sum(lost.values()) >= least_ns else {}


def _rare_lines(profile: Profile) -> dict[Phase, tuple[SourceLine, ...]]:
    """Returns by phase the lines of the loop's own that run in a few steps, at no regular interval."""
    found = {Phase.OTHER: irregular_lines(profile), Phase.DATA_WAIT: irregular_batches(profile)}
    return {phase: lines for phase, lines in found.items() if lines}
