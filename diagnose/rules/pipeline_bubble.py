"""Stages of the pipeline wait for micro-batches"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Pipeline
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Calls, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule
from diagnose.source.calls import BY_PLACE, with_arguments

ENOUGH = 4
"""Micro-batches per rank: the bubble is then a fifth at most, and more of them hardly help."""

PIPELINED = (Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION)
"""Where the schedule computes, and waits for its neighbours."""

MIN_SHARE = 0.04
"""Of the step: stages that are not quite even, and what a message takes, are hardly more."""

LOW, HIGH = 0.5, 1.2
"""Smaller micro-batches fill a device less well; an interleaved schedule can save more."""


def staged(num_microbatches: int, idle_ms: float, micro_batch: int | None = None) -> Profile:
    """Four ranks, each of which waits so long; a micro-batch has so many samples."""
    pipeline = Pipeline(
        kind="ScheduleGPipe",
        num_stages=4,
        num_ranks=4,
        num_microbatches=num_microbatches,
        idle_ns=idle_ms * 1e6,
        call=f"ScheduleGPipe(stage, {num_microbatches}, loss_fn=loss_fn)",
    )
    calls = Calls(num_steps=8, batch_size=micro_batch) if micro_batch else None
    program = Program(pipeline=pipeline, calls=calls)
    return profile(communication_ms=idle_ms, program=program)


class PipelineBubble(Rule):
    """
    ## What it means
    The first stage has to begin before the second can, and the last has to end before the first may go on.
    With few micro-batches that filling and draining is a good part of the step.

    ## What to do
    Divide the batch into more micro-batches, four per rank, or use an interleaved schedule.

    ## When it is wrong
    Micro-batches that fill the device only just. Of what the ranks wait for their neighbours, that of the
    rank which waits least is counted, as far as its schedule explains it; where the parts of a model are
    divided among ranks besides, their exchanges look the same. It is measured of
    `torch.distributed.pipelining` on CPUs alone: on GPUs the host does not wait, and the rule abstains.
    """

    needs = ("program.pipeline.idle_ns",)
    fires_on = (staged(4, 40), staged(8, 25), staged(4, 40, micro_batch=2))
    silent_on = (
        staged(16, 16),
        staged(4, 3),
        staged(64, 40),
        staged(4, 40, micro_batch=1),
        staged(4, 40, micro_batch=17),
        staged(15, 40),
    )

    def applies(self, profile: Profile) -> bool:
        pipeline = profile.program.pipeline
        return pipeline is not None and pipeline.num_ranks > 1

    def check(self, profile: Profile) -> Finding | None:
        pipeline, calls = profile.program.pipeline, profile.program.calls
        assert pipeline is not None and pipeline.idle_ns is not None
        now = pipeline.num_microbatches
        then = _divided(now, ENOUGH * pipeline.num_ranks, calls.batch_size if calls else None)
        there_ns = sum(profile.phase_time_ns.get(phase, 0.0) for phase in PIPELINED)
        bubble = _bubble(pipeline)
        # The schedule's own idleness: what all ranks wait beyond it has another cause.
        idle_ns = min(
            pipeline.idle_ns, bubble * there_ns, profile.phase_time_ns.get(Phase.COMMUNICATION, 0.0)
        )
        lost_ns = idle_ns * (1 - now / then)  # what one micro-batch takes, at the beginning and at the end
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        idle_share = idle_ns / profile.step_time_ns
        name = pipeline.call.partition("(")[0].rpartition(".")[2]
        return Finding(
            rule=self.name,
            summary=f"Stages idle {format_share(idle_share)} of each step: too few micro-batches.",
            lost_ns={Phase.COMMUNICATION: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, max(lost_ns, idle_ns)),
            assumption=f"{then} micro-batches take as long together as {now} do now",
            evidence=(
                f"{pipeline.num_ranks} ranks work at {now} micro-batches; so divided, a schedule idles"
                f" {format_share(bubble)} of its time.",
                f"Each rank waits {format_ms(pipeline.idle_ns)} or more of each step for a neighbour.",
            ),
            fix=f"Divide each batch into {then} micro-batches.",
            code=with_arguments(
                pipeline.call if name in BY_PLACE else "", pipeline.kind, n_microbatches=then
            ),
            file=pipeline.file,
            line=pipeline.line,
        )


def _divided(now: int, wanted: int, samples: int | None) -> int:
    """Into how many micro-batches of one size to divide a batch, of `now` with so many samples each: as
    many as wanted or up to twice as many, else as many of the wanted as can be."""
    if samples is None:
        return max(now, wanted)
    numbers = [now * part for part in range(1, samples + 1) if samples % part == 0]
    enough = [number for number in numbers if wanted <= number <= 2 * wanted]
    return min(enough, default=max([now, *(number for number in numbers if number <= wanted)]))


def _bubble(pipeline: Pipeline) -> float:
    """The part of its time that a rank idles in a schedule which waits for whole backward passes."""
    others, stages = pipeline.num_ranks - 1, pipeline.num_stages // pipeline.num_ranks
    return others / (stages * pipeline.num_microbatches + others)
