"""Gradients are averaged over the ranks in every micro-batch"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.parallel import Averaging, Ddp, Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Optimizer, Program
from diagnose.core.units import format_ms
from diagnose.rules._examples import profile
from diagnose.rules._rank_examples import ranks_example
from diagnose.rules._reductions import averaging_by_hand_ns, by_hand, reduces_in
from diagnose.rules.base import WORTH_SHARE, Rule

MIN_PASSES = 1.9
"""Backward passes per step: with one, there is nothing to leave out."""

MAX_ROUNDS = 1.5
"""Rounds of backward passes and optimizer steps in a step: in one, all passes add up to the same gradients,
however many optimizers then share the parameters. Where they take turns, as those of a GAN do, each pass
has to be averaged."""

HIDDEN_COST = 0.3
"""Part of a hidden reduction that still costs: it takes memory bandwidth, and on CPUs the cores."""

MOST_WAITED = 0.9
"""Part of what a phase takes that can be won of it: one average remains."""

MOST_BESIDE = 0.5
"""Part of the backward passes that averaging can take beside what they compute: gradients that are sparse
are far less than their parameters."""

COPY_NS, COPY_BYTES_PER_NS = 2_400.0, 12.0
"""By so many nanoseconds each gradient tensor holds a pass on a CPU up, and so many bytes of gradients by
one, as DDP divides them into its buckets. Measured by `benchmarks/ddp_buckets.py` with one thread, for 20
and 200 tensors of 1 to 100 MB together, in a process that has the memory for itself."""

LOW, HIGH = 0.6, 1.5


def accumulating(passes: float, synced: float, waited_ns: float | None = None) -> Program:
    ranks = (
        Ddp(
            rank=rank,
            world_size=2,
            comm_ns=8e6,
            overlap_ns=3e6,
            compute_ns=10e6,
            synced_share=synced,
            passes_per_step=passes,
        )
        for rank in (0, 1)
    )
    if waited_ns is None:
        return Program(ddp=tuple(ranks))
    met = Meetings(num_steps=100, wait_ns={0: waited_ns, 1: 2 * waited_ns}, common_ns=waited_ns / 2)
    return Program(ddp=tuple(ranks), meetings=met)


MUON = Optimizer(kind="Muon", num_tensors=9, num_elements=9)
ADAM = Optimizer(kind="AdamW", num_tensors=2, num_elements=9)


def shared(rounds: float | None, num_models: int = 1) -> Program:
    """Two optimizers, and two backward passes that they step after: together, or each after its own."""
    program = accumulating(2, 1.0)
    ddp = tuple(replace(each, rounds_per_step=rounds, num_models=num_models) for each in program.ddp)
    return replace(program, ddp=ddp, optimizers=(MUON, ADAM))


def averaging(passes: float, times: float, rounds: float = 1.0, *, inside: bool = False) -> Profile:
    """Two ranks that add up so much themselves, after so many passes of a step, or inside of them."""
    times_ms = {Phase.COMMUNICATION: 20.0, Phase.BACKWARD: 80.0}
    found = Averaging(passes=passes, times=times, rounds=rounds, inside=inside)
    job = ranks_example(times_ms, times_ms, program=Program(averaging=found))
    return replace(job, ranks=tuple(replace(each, averaged_ns=20e6) for each in job.ranks))


class MissingNoSync(Rule):
    """
    ## What it means
    Several micro-batches make a step, and DDP, or the loop itself, averages the gradients after each of
    them. Only the last average counts.

    ## What to do
    Run all but the last micro-batch, forward and backward, under `model.no_sync()`; a loop that averages
    itself does so after the last one.

    ## When it is wrong
    Several losses whose gradients must be averaged each by itself.
    """

    needs = ("program.ddp",)
    actions = ("no-sync",)
    explains = ("exposed-communication",)
    fires_on = (
        profile(program=accumulating(4, 1.0)),
        profile(program=accumulating(2, 1.0)),
        profile(program=shared(1.0)),
        averaging(4.0, 4.0),
        averaging(4.0, 4.0, inside=True),
        profile(communication_ms=30, program=accumulating(4, 1.0, waited_ns=24e6)),
    )
    silent_on = (
        profile(program=accumulating(4, 0.25)),
        profile(program=accumulating(1, 1.0)),
        profile(program=shared(2.0)),
        profile(program=shared(None)),
        profile(program=shared(1.0, num_models=2)),
        averaging(1.0, 1.0),
        averaging(2.0, 1.0),
        averaging(1.0, 2.0),
        averaging(4.0, 4.0, 4.0),
        averaging(2.0, 1.9, 2.0, inside=True),
    )

    def applies(self, profile: Profile) -> bool:
        if by_hand(profile) is not None:
            return len(profile.ranks) > 1
        ddp = profile.program.ddp
        if not ddp:
            return False
        rounds = ddp[0].rounds_per_step
        return len(profile.program.optimizers) <= 1 or (rounds is not None and rounds < MAX_ROUNDS)

    def check(self, profile: Profile) -> Finding | None:
        if by_hand(profile) is not None:
            return self._by_hand(profile)
        ddp = profile.program.ddp
        passes, synced = ddp[0].passes_per_step or 1.0, ddp[0].synced_share
        if synced is None or passes < MIN_PASSES or synced * passes < MIN_PASSES * ddp[0].num_models:
            return None
        exposed = min((rank.exposed_ns for rank in ddp if rank.exposed_ns is not None), default=None)
        if exposed is None:
            return None
        hidden = min(rank.overlap_ns or 0.0 for rank in ddp)
        needless = synced * passes - 1
        waiting = reduces_in(profile)
        there_ns = profile.spent_ns(waiting)
        meetings = profile.program.meetings
        if meetings is not None and meetings.wait_ns:
            # Every wait was measured; what the rank that waits least does is no straggler's doing.
            exposed = min(meetings.wait_ns.values()) / (needless + 1)
        backward_ns = profile.spent_ns(Phase.BACKWARD)
        into_ns = _into_buckets_ns(profile)
        beside_ns = needless * (HIDDEN_COST * hidden + into_ns)
        lost = {waiting: min(needless * exposed, MOST_WAITED * there_ns)}
        in_backward_ns = lost.get(Phase.BACKWARD, 0.0) + min(beside_ns, MOST_BESIDE * backward_ns)
        lost[Phase.BACKWARD] = min(in_backward_ns, MOST_WAITED * backward_ns)
        lost_ns, most_ns = sum(lost.values()), sum(map(profile.spent_ns, lost))
        told = (f"DDP puts the gradients into its buckets meanwhile, in about {format_ms(into_ns)}.",)
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Gradients are averaged {synced * passes:.0f} times in each step; once is enough.",
            lost_ns={phase: ns for phase, ns in lost.items() if ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, most_ns),
            assumption="each average holds a pass up for as long as the others do",
            evidence=(
                f"{passes:.0f} backward passes per step, all of those looked at with a reduction.",
                f"One reduction holds the pass up for {format_ms(exposed)}.",
                *(told if into_ns else ()),
            ),
            fix="Run all but the last micro-batch under model.no_sync().",
            code="with model.no_sync(): criterion(model(x), y).backward()",
            actions=self.actions,
        )

    def _by_hand(self, profile: Profile) -> Finding | None:
        """A loop that averages its gradients itself does so after each backward pass."""
        averaging, averaged_ns = by_hand(profile), averaging_by_hand_ns(profile)
        if averaging is None or averaged_ns is None:
            return None
        times = min(averaging.passes, averaging.times) / max(1.0, averaging.rounds)
        if times < MIN_PASSES:
            return None
        there_ns = profile.spent_ns(Phase.COMMUNICATION)
        if profile.program.collective_ns is not None:
            averaged_ns = min(averaged_ns, profile.program.collective_ns)  # the rest waits for other ranks
        lost_ns = min((1 - 1 / times) * averaged_ns, there_ns)
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Gradients are averaged {times:.0f} times in each step; once is enough.",
            lost_ns={Phase.COMMUNICATION: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, there_ns),
            assumption="each average takes as long as the others do",
            evidence=(
                f"After {averaging.passes:.0f} backward passes of a step the loop adds up"
                f" {averaging.times:.1f} times as much as its optimizer updates.",
                f"That takes every rank {format_ms(averaged_ns)} of each step.",
            ),
            fix="Average once, after the last micro-batch and before the optimizer's step: until then the"
            " gradients add up on each rank.",
        )


def _into_buckets_ns(profile: Profile) -> float:
    """Returns nanoseconds of a backward pass in which DDP puts gradients into its buckets as they come; 0
    on a GPU, which does so when it is its turn."""
    ddp = profile.program.ddp[0]
    if ddp.on_cuda:
        return 0.0
    num_tensors = sum(optimizer.num_tensors for optimizer in profile.program.optimizers)
    return num_tensors * COPY_NS + (ddp.param_bytes or 0) / COPY_BYTES_PER_NS
