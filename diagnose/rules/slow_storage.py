"""Workers wait for storage or network"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._machine import disk
from diagnose.rules._supply import DIVIDE, WELL_FED, fed_by, supply_of
from diagnose.rules._worker_line import hottest_line
from diagnose.rules.base import Rule


class SlowStorage(Rule):
    """
    ## What it means
    The loop waits for batches while its workers, as many as there are CPUs, neither compute nor want
    to: they wait for a disk, a network or another service. Or it is one worker that reads a stream, and
    would keep up but for that: a stream need not be one that several can share.

    ## What to do
    Read less and in larger pieces: shards instead of single files, a local copy, a cache, compressed
    samples. Workers that only wait may also outnumber the CPUs.

    ## When it is wrong
    A dataset that paces itself, such as a live stream. With fewer workers than CPUs the cheaper cure is
    more of them, and the fault is `too-few-workers`.
    """

    needs = ("input.workers", "input.steady_wait_ns", "input.workers.delay_share")
    explains = ("too-few-workers",)
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"cpu_share": 0.05}),
        fed_by(data_wait_ms=30, fetch_ms=390, num_workers=4, cpus=4, workers={"cpu_share": 0.3}),
        fed_by(
            data_wait_ms=30,
            fetch_ms=100,
            num_workers=1,
            loader={"iterable": True},
            workers={"cpu_share": 0.6},
        ),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2),
        fed_by(data_wait_ms=20, fetch_ms=195, workers={"cpu_share": 0.05}),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, loader={"iterable": True}),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return any(loader.num_workers for loader in profile.program.loaders[:1])

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        supply = supply_of(profile)
        if supply is None or not supply.behind or not supply.waits_for_storage:
            return None
        lost_ns = supply.won_without_waiting_ns()
        if not lost_ns:
            return None
        line = hottest_line(profile)
        waits = 1 - supply.workers.cpu_share - supply.delay_share
        read = profile.input.late_read_bytes
        return Finding(
            rule=self.name,
            summary=(
                f"Workers wait for storage or network, and {format_share(supply.wait_share)} of each step"
                " is spent waiting for them."
            ),
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=supply.wait_ns,
            assumption="samples come from a cache or faster storage, and workers wait for a CPU only",
            evidence=(
                *supply.evidence(),
                f"Workers neither compute nor want a CPU for {format_share(waits)} of that time.",
                *((f"{format_bytes(read)} per step come from a disk of this machine.",) if read else ()),
                *disk(profile.host),
                *((f"Most of it is spent at: {line.text}",) if line is not None and line.text else ()),
            ),
            fix="Read samples from faster or nearer storage, in larger pieces, or ahead of time."
            + (
                f" Or, if it can be divided into shards: {DIVIDE} the DataLoader more workers."
                if supply.loader.iterable
                else ""
            ),
            file=line.file if line is not None else supply.loader.file,
            line=line.line if line is not None else supply.loader.line,
        )
