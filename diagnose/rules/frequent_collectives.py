"""The script calls collectives of its own in every step"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp, Fsdp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._ranks import ranks_example
from diagnose.rules.base import Rule

MIN_SHARE = 0.03
"""One small reduction per step takes less."""

LOW = 0.5
"""One in many steps would remain."""

TURNS = {Phase.COMMUNICATION: 20.0, Phase.BACKWARD: 80.0}
"""Now one rank is late to a single reduction and now the other."""


SHARDED = Program(fsdp=Fsdp(world_size=2, gather_ns=12e6, scatter_ns=7e6))
LAUNCHED = Program(fsdp=Fsdp(world_size=2, gather_ns=1e6, scatter_ns=1e6))
NOT_KNOWN = Program(fsdp=Fsdp(world_size=2))


class FrequentCollectives(Rule):
    """
    ## What it means
    Besides the gradients, the loop averages a metric, gathers results or waits at a barrier in every step.
    Each such call stops the loop until all ranks have come.

    ## What to do
    Sum on each rank and reduce once every hundred steps, or at the end of the epoch. Take barriers out.

    ## When it is wrong
    A loop that averages its gradients itself, or a loss that needs the other ranks' batches. Nothing is
    said of `fully_shard` on GPUs, nor of ranks there that send to each other, whose model or optimizer
    calls collectives, or whose DDP sends buffers: a step's own communication cannot be told from the
    script's.
    """

    explains = ("logging-io", "slow-metrics")
    fires_on = (
        ranks_example(
            {Phase.COMMUNICATION: 20.0, Phase.BACKWARD: 80.0},
            {Phase.COMMUNICATION: 18.0, Phase.BACKWARD: 82.0},
        ),
        ranks_example(
            {Phase.COMMUNICATION: 5.0, Phase.BACKWARD: 95.0},
            {Phase.COMMUNICATION: 40.0, Phase.BACKWARD: 60.0},
        ),
    )
    silent_on = (
        ranks_example(
            {Phase.COMMUNICATION: 1.0, Phase.BACKWARD: 99.0},
            {Phase.COMMUNICATION: 40.0, Phase.BACKWARD: 60.0},
        ),
        ranks_example({Phase.BACKWARD: 100.0}, {Phase.BACKWARD: 100.0}),
        ranks_example(TURNS, TURNS, program=Program(collective_ns=1e6)),
        ranks_example(TURNS, TURNS, program=SHARDED),
        ranks_example(TURNS, TURNS, program=LAUNCHED, device="cuda"),
        ranks_example(TURNS, TURNS, program=NOT_KNOWN),
        ranks_example(TURNS, TURNS, exchanged_ms=19.0),
        ranks_example(TURNS, TURNS, exchanged_ms=None, device="cuda"),
        ranks_example(TURNS, TURNS, program=Program(ddp=(Ddp(broadcasts_buffers=True),)), device="cuda"),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return len(profile.ranks) > 1

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        lost_ns = min(_among_all_ns(rank) for rank in profile.ranks)
        if profile.program.collective_ns is not None:
            told_apart_ns = min(rank.exchanged_ns or 0.0 for rank in profile.ranks)
            lost_ns = min(lost_ns, profile.program.collective_ns - told_apart_ns)
        fsdp = profile.program.fsdp
        if fsdp is not None:
            if profile.run.device != "cpu" or fsdp.gather_ns is None or fsdp.scatter_ns is None:
                return None
            lost_ns -= fsdp.gather_ns + fsdp.scatter_ns
        if profile.run.device != "cpu" and any(ddp.broadcasts_buffers for ddp in profile.program.ddp):
            return None  # what launching that takes is not told from the script's
        usual_ns = profile.series.median_ns.get(Phase.COMMUNICATION)
        if usual_ns is not None:
            lost_ns = min(lost_ns, 2 * usual_ns)  # once an epoch is not each step
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        line = next((line for line in profile.where if line.phase is Phase.COMMUNICATION), None)
        return Finding(
            rule=self.name,
            summary=f"Collectives of the script's own take {format_share(lost_ns / profile.step_time_ns)}.",
            lost_ns={Phase.COMMUNICATION: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=max(lost_ns, profile.phase_time_ns[Phase.COMMUNICATION]),
            assumption="they can be left out or called once in many steps",
            evidence=(
                f"Every rank spends {format_ms(lost_ns)} or more of each step in collectives of Python's.",
                "In each step the rank that waits least does not wait for another: this is their own cost.",
            ),
            fix="Reduce metrics once in many steps.",
            file=line.file if line is not None and not line.file.startswith("<") else "",
            line=line.line if line is not None and not line.file.startswith("<") else 0,
        )


def _among_all_ns(rank: RankProfile) -> float:
    """Time in what all ranks take part in and the loop calls; none where that is not known."""
    if rank.exchanged_ns is None:
        return 0.0
    return rank.phase_time_ns.get(Phase.COMMUNICATION, 0.0) - rank.exchanged_ns
