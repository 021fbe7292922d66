"""Stages of the pipeline wait for micro-batches"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Pipeline
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

ENOUGH = 4
"""Micro-batches per stage: the bubble is then a fifth at most, and more of them hardly help."""

IDLING = (Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION, Phase.OTHER)
"""Where a stage waits for its neighbours."""

MIN_SHARE = 0.04

LOW, HIGH = 0.5, 1.2
"""Smaller micro-batches fill a device less well; an interleaved schedule can save more."""


def staged(num_microbatches: int, idle_ms: float) -> Program:
    return Program(
        pipeline=Pipeline(num_stages=4, num_microbatches=num_microbatches, idle_ns=idle_ms * 1e6)
    )


class PipelineBubble(Rule):
    """
    ## What it means
    The first stage has to begin before the second can, and the last has to end before the first may go on.
    With few micro-batches that filling and draining is a good part of the step.

    ## What to do
    Divide the batch into more micro-batches, four per stage, or use an interleaved schedule.

    ## When it is wrong
    Stages of unequal length idle as well: more micro-batches do not help there. It reads the idle time of
    the stages, which nothing measures yet; no run has tried it.
    """

    needs = ("program.pipeline.idle_ns",)
    fires_on = (profile(program=staged(4, 40)), profile(program=staged(8, 25)))
    silent_on = (
        profile(program=staged(16, 16)),
        profile(program=staged(4, 3)),
        profile(program=staged(64, 40)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        pipeline = profile.program.pipeline
        return pipeline is not None and pipeline.num_stages > 1

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        pipeline = profile.program.pipeline
        assert pipeline is not None and pipeline.idle_ns is not None
        stages, now = pipeline.num_stages, pipeline.num_microbatches
        then = ENOUGH * stages
        if now >= then:
            return None
        step_ns = profile.step_time_ns
        # The schedule's own idleness: what a stage idles beyond it has another cause.
        idle_ns = min(pipeline.idle_ns, step_ns * _bubble(stages, now))
        busy_ns = step_ns - idle_ns
        lost_ns = step_ns - busy_ns / (1 - _bubble(stages, then))
        times = {phase: profile.phase_time_ns.get(phase, 0.0) for phase in IDLING}
        there_ns = sum(times.values())
        lost_ns = min(lost_ns, there_ns)
        if lost_ns < MIN_SHARE * step_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Stages idle {format_share(idle_ns / step_ns)} of each step: too few micro-batches.",
            lost_ns={phase: lost_ns * ns / there_ns for phase, ns in times.items() if ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, max(lost_ns, idle_ns)),
            assumption=f"{then} micro-batches take as long together as {now} do now",
            evidence=(
                f"{stages} stages share {now} micro-batches; a schedule of these idles"
                f" {format_share(_bubble(stages, now))} of the time.",
                f"The stages idle for {format_ms(pipeline.idle_ns)} of each step on average.",
            ),
            fix=f"Divide each batch into {then} micro-batches.",
            code=f"ScheduleGPipe(stage, n_microbatches={then})",
        )


def _bubble(stages: int, microbatches: int) -> float:
    return (stages - 1) / (microbatches + stages - 1)
