"""The data does not fit into memory and is read from disk each epoch"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._machine import disk
from diagnose.rules._supply import supply_of
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules._worker_rule import WorkerRule

STILL_READING = 0.6
"""Bytes read per step at the end of the run, relative to its beginning: a cache would have taken most."""

MIN_READ_BYTES = 1 << 20
"""Per step; less comes quickly from any disk."""

MIN_EPOCHS = 1
"""Epochs that began within the measured steps: what they read had been read before."""


def reading(**stats: float) -> Profile:
    """Workers that wait for what a step reads from the disk: the same in each epoch, but for these."""
    read = {"early_read_bytes": 9e6, "late_read_bytes": 8e6, "epoch_starts": 3, **stats}
    return fed_by(data_wait_ms=50, fetch_ms=200, workers={"cpu_share": 0.1}, stats=read)


class CacheThrash(WorkerRule):
    """
    ## What it means
    Workers wait for the disk, and epoch after epoch the same data is read from it again: it does not fit
    into the memory that is left for the page cache, so each epoch pushes out what the next one needs.

    ## What to do
    Make the data smaller (compress, resize, lower precision), divide it among machines, give the job more
    memory, or read it in an order that uses each block while it is there: shards with a shuffle buffer.

    ## When it is wrong
    Files opened with direct input and output, or a file system that does not cache.
    """

    needs = ("input.early_read_bytes", "input.late_read_bytes", "input.workers.delay_share")
    explains = ("slow-storage", "too-few-workers")
    fires_on = (reading(),)
    silent_on = (WELL_FED, reading(epoch_starts=0), reading(late_read_bytes=1e4))

    def check(self, profile: Profile) -> Finding | None:
        supply, stats = supply_of(profile), profile.input
        early, late = stats.early_read_bytes, stats.late_read_bytes
        if supply is None or early is None or late is None or not supply.behind or supply.needs_cpu:
            return None
        if stats.epoch_starts < MIN_EPOCHS or late < max(MIN_READ_BYTES, STILL_READING * early):
            return None
        return Finding(
            rule=self.name,
            summary=f"The data is read from disk again each epoch, and {format_share(supply.wait_share)} of"
            " each step is spent waiting for it.",
            lost_ns={Phase.DATA_WAIT: supply.wait_ns},
            low_ns=0.4 * supply.wait_ns,
            high_ns=supply.wait_ns,
            assumption="the data comes from memory from the second epoch on",
            evidence=(
                f"A step read {format_bytes(early)} from the disk in the first quarter of the run and still"
                f" {format_bytes(late)} in the last, after {stats.epoch_starts} further epochs began.",
                *disk(profile.host),
                *supply.evidence(),
            ),
            fix="Make the data small enough for the memory that is free, or read it in shards.",
            file=supply.loader.file,
            line=supply.loader.line,
        )
