"""One rank's link is far slower than the others'"""

from __future__ import annotations

from statistics import median

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp, Link
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._ranks import reduces_in, steady_wait_ns
from diagnose.rules.base import Rule

MIN_LINKS = 3
"""Of two links, neither is known to be the slow one."""

SLOW = 0.6
"""Part of the other links' rate: links of one kind differ by a tenth or two."""

MIN_SHARE = 0.03

LOW, HIGH = 0.5, 1.0
"""Part of the waiting would be there with a link like the others."""


def linked(*rates: float, exposed_ms: float = 20) -> Program:
    ranks = range(len(rates))
    return Program(
        links=tuple(Link(rank=rank, bytes_per_s=rates[rank]) for rank in ranks),
        ddp=tuple(
            Ddp(
                rank=rank,
                world_size=len(rates),
                backend="nccl",
                compute_ns=40e6,
                comm_ns=(exposed_ms + 5) * 1e6,
                overlap_ns=5e6,
                exposed_ns_by_pass=dict.fromkeys(range(4, 10), exposed_ms * 1e6),
            )
            for rank in ranks
        ),
    )


class SlowLink(Rule):
    """
    ## What it means
    Averaging gradients goes round all ranks, at the pace of the slowest link. One link carries far less
    than the others: a cable, a port that fell back to a lower rate, a card in a slot across the machine.

    ## What to do
    Look at that rank's machine: `nvidia-smi topo -m`, `ibstat`, the errors of the port. Take the machine
    out of the job if it cannot be mended now.

    ## When it is wrong
    Ranks that are further apart by design, such as two machines of which one has more ranks. It reads the
    rate of each rank's link in a collective, which nothing measures yet; no run has tried it.
    """

    needs = ("program.ddp",)
    explains = ("exposed-communication",)
    fires_on = (
        profile(program=linked(20e9, 21e9, 5e9, 20e9)),
        profile(program=linked(20e9, 21e9, 10e9, exposed_ms=10)),
    )
    silent_on = (
        profile(program=linked(20e9, 21e9, 18e9, 20e9)),
        profile(program=linked(20e9, 5e9)),
        profile(program=linked(20e9, 21e9, 5e9, 20e9, exposed_ms=1)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return sum(link.bytes_per_s is not None for link in profile.program.links) >= MIN_LINKS

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        rates = {link.rank: link.bytes_per_s for link in profile.program.links if link.bytes_per_s}
        slowest = min(rates, key=lambda rank: rates[rank])
        usual = median(rate for rank, rate in rates.items() if rank != slowest)
        steady_ns = steady_wait_ns(profile.program.ddp)
        waiting = reduces_in(profile)
        if rates[slowest] > SLOW * usual or steady_ns is None:
            return None
        waited_ns = min(
            steady_ns * profile.program.ddp[0].synced_passes,
            profile.phase_time_ns.get(waiting, 0.0),
        )
        lost_ns = waited_ns * (1 - rates[slowest] / usual)
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=(
                f"The link of rank {slowest} carries {format_share(rates[slowest] / usual)} of what the"
                " others do."
            ),
            lost_ns={waiting: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=max(lost_ns, HIGH * waited_ns),
            assumption="a reduction takes as long as its slowest link",
            evidence=(
                f"Rank {slowest} reaches {format_bytes(rates[slowest])} a second, the others"
                f" {format_bytes(usual)}.",
                f"Every rank waits {format_ms(waited_ns)} of each step for gradients.",
            ),
            fix=f"Have the network of rank {slowest}'s machine looked at.",
            ranks=(slowest,),
        )
