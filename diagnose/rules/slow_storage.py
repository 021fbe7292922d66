"""Samples come slowly from storage or network"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import OwnLoading, Reading
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._crowding import CROWDED_BOUNDS, crowded_by_ns, crowded_ns
from diagnose.rules._lines import at
from diagnose.rules._loader_calls import DIVIDE
from diagnose.rules._machine import disk
from diagnose.rules._own_loading import (
    MOSTLY,
    LoadingRule,
    has_come_to_keep,
    may_only_read,
    only_reads,
    opening_reads,
)
from diagnose.rules._phases import shared
from diagnose.rules._serial import CAUSE_ACTIONS, Serial, serial_of, where_loading
from diagnose.rules._serial_examples import ON_BOTH_CPUS, ON_ONE_CPU, loading, pieces
from diagnose.rules._supply import MORE_WORKERS, Supply, supply_of, won_beside
from diagnose.rules._worker_examples import A_CPU_IDLE, WELL_FED, crowded_by, fed_by
from diagnose.rules._worker_line import where_slow

MANY_READS = 8.0
"""Calls that read for one sample, without those that only fill a buffer: of four files."""

FOR_NOTHING = "samples are read in large pieces that hold nothing else, as good as for nothing"
FEW_FILES = (
    "Put the samples into few large files, each with all parts of its samples side by side, and read those."
)
READ_LESS = (
    "Read only what the sample needs: keep the file open or map it into memory"
    " (numpy.load(mmap_mode='r')), or"
)

STREAM = {"iterable": True}

SMALL_FILES = Reading(opens=2080.0, reads=6240.0, samples=32.0, read_bytes=30e6, made_bytes=25e6, share=0.8)
"""65 files of a sample, each of which takes some 70 us."""

WHOLE_FILE = Reading(opens=32.0, reads=96.0, samples=32.0, read_bytes=1280e6, made_bytes=0.1e6, share=0.9)
"""40 MB of which a sample takes a row."""

PICTURES = Reading(opens=32.0, reads=450.0, samples=32.0, read_bytes=3e6, made_bytes=19e6, share=0.9)
"""A photograph per sample that is decoded in the line that opens it."""

WAITING = {"cpu_share": 0.1}

QUERIES = Reading(opens=0.0, reads=0.0, samples=32.0, read_bytes=0.0, share=0.9, asking_share=0.85)
"""A data base that looks through a table for each sample; its pages are in memory."""

DISTANT = replace(ON_BOTH_CPUS, process_cpus=0.9, on_cpu_share=0.62, num_threads=1)
"""A training thread that stands still for 37 ms of each 100."""


UNCACHED = Reading(opens=0.0, reads=481.0, samples=16.0, read_bytes=31e6, made_bytes=8e3, share=0.9)
"""Pieces of 64 KiB that no cache keeps, 30 for a sample."""

OTHERS = (replace(at("loss.backward()", 0.42, phase=Phase.BACKWARD), off_cpu=0.9),)
"""The line that stands still, for other ranks, where it does not read."""

FROM_STORAGE: dict[str, Any] = {
    "cpus": 2,
    "host": HostStats(cpus=2, process_cpus=1.0, runnable_share=0.3, child_cpus=0.3, busy_cpus=1.9),
    "workers": {"cpu_share": 0.27, "delay_share": 0.35, "ready_batches": 3.4, "reading": UNCACHED},
    "stats": {"early_read_bytes": 31e6, "late_read_bytes": 31e6},
}
"""Workers that keep up, whose reading also takes others half a CPU."""


class SlowStorage(LoadingRule):
    """
    ## What it means
    The loop waits for batches while its workers, as many as there are CPUs, neither compute nor want
    to: they wait for a disk, a network or another service. Or it is one worker that reads a stream, and
    would keep up but for that: a stream need not be one that several can share.

    Or they keep up, and the CPUs that reading takes, from them, from the kernel and from the host of a
    virtual machine, are the model's no more.

    Reading need not wait. Where the page cache has the files it takes a CPU all the time, and most of that
    may go into opening small files, into reading far more than a sample keeps, or into a data base or an
    archive that looks for what is asked for. The fault is named so where most of the loading passes where
    files are read, and takes no longer than reading them does, or where such a store is asked. Without
    workers the training thread does that itself, or stands still while it reads.

    The readings that it needs, below, are of workers. Without any it needs `input.own.reading_share` and
    `input.own.reads`.

    ## What to do
    Read less and in larger pieces: shards instead of single files, a local copy, a cache, compressed
    samples. Keep a file open, or map it into memory, instead of opening it for each sample. Workers that
    only wait may also outnumber the CPUs.

    ## When it is wrong
    A dataset that paces itself, such as a live stream. Where more workers would win most of the wait, and
    whoever loads is not seen to stand still while it reads, that is the cheaper cure, and the fault is
    `too-few-workers`, or `serial-loading` where there are none. Files that are decoded in the line that
    opens them look like reading where decoding one takes as little as opening it.
    """

    needs = ("input.workers", "input.steady_wait_ns", "input.workers.delay_share")
    own_needs = ("input.own.reading_share", "input.own.reads")
    explains = ("repeated-preparation", "serial-loading", "slow-transform", "too-few-workers")
    actions = CAUSE_ACTIONS
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"cpu_share": 0.05}),
        fed_by(data_wait_ms=30, fetch_ms=390, num_workers=4, cpus=4, workers={"cpu_share": 0.3}),
        fed_by(data_wait_ms=30, fetch_ms=100, num_workers=1, loader=STREAM, workers={"cpu_share": 0.6}),
        fed_by(data_wait_ms=30, fetch_ms=100, num_workers=1, workers={**WAITING, "reading": QUERIES}),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"reading": SMALL_FILES}),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"reading": WHOLE_FILE}),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"reading": QUERIES}),
        fed_by(data_wait_ms=50, fetch_ms=100, **{**A_CPU_IDLE, "workers": {"reading": SMALL_FILES}}),
        fed_by(data_wait_ms=10, fetch_ms=110, **crowded_by(reading=SMALL_FILES)),
        fed_by(data_wait_ms=7, fetch_ms=94, collate_ms=2, send_ms=3, **FROM_STORAGE),
        loading(40, own=pieces()),
        loading(40, own=pieces(reads=96.0, read_bytes=1280e6)),
        loading(40, own=pieces(reads=0.0, read_bytes=0.0, asking_share=0.8)),
        loading(40, own=pieces(reads=0.0, read_bytes=0.0), host=DISTANT),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=7, fetch_ms=94, collate_ms=2, send_ms=3, **{**FROM_STORAGE, "stats": {}}),
        loading(40),
        loading(40, own=pieces(reading_share=0.3)),
        loading(40, own=pieces(reading_share=0.3), host=DISTANT),
        replace(loading(40, own=pieces(reads=0.0, read_bytes=0.0), host=DISTANT), where=OTHERS),
        loading(40, own=pieces(reads=0.0, read_bytes=0.0), host=replace(DISTANT, process_cpus=1.2)),
        loading(40, own=pieces(reads=96.0)),
        loading(40, own=pieces(reads=288.0, read_bytes=2.1e6)),
        loading(40, own=pieces(), stats={"late_wait_ns": 1e6}),
        loading(40, own=pieces(), host=ON_ONE_CPU),
        loading(3, own=pieces()),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"reading": PICTURES}),
        fed_by(
            data_wait_ms=50, fetch_ms=200, cpus=2, workers={"reading": replace(SMALL_FILES, reads=None)}
        ),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"reading": replace(SMALL_FILES, share=0.3)}),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, workers={"reading": SMALL_FILES}),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2),
        fed_by(data_wait_ms=20, fetch_ms=195, workers={"cpu_share": 0.05}),
        fed_by(data_wait_ms=30, fetch_ms=100, num_workers=1, workers=WAITING),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, loader=STREAM),
    )

    def applies(self, profile: Profile) -> bool:
        serial = serial_of(profile)
        return (serial is not None and serial.waits) or super().applies(profile)

    def check(self, profile: Profile) -> Finding | None:
        serial = serial_of(profile)
        if serial is not None:
            return self._own_reading(profile, serial)
        supply = supply_of(profile)
        if supply is None:
            return None
        found = self._reading(profile, supply) if _only_reads(supply) else None
        if found is not None:
            return found
        if not supply.behind or not (supply.waits_for_storage or _stands_reading(supply)):
            return None
        lost_ns = supply.won_without_waiting_ns()
        if not lost_ns:
            return None
        where = where_slow(profile, supply.loader)
        waits = 1 - supply.workers.cpu_share - supply.delay_share
        read = profile.input.late_read_bytes
        return Finding(
            rule=self.name,
            summary=f"Workers wait for storage or network, and {format_share(supply.wait_share)} of each"
            " step is spent waiting for them.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=supply.wait_ns,
            assumption="samples come from a cache or faster storage, and workers wait for a CPU only",
            evidence=(
                *supply.evidence(),
                f"Workers neither compute nor want a CPU for {format_share(waits)} of that time.",
                *((f"{format_bytes(read)} per step come from a disk of this machine.",) if read else ()),
                *disk(profile.host),
                *where.evidence,
            ),
            fix="Read samples from faster or nearer storage, in larger pieces, or ahead of time."
            + (
                f" Or, if it can be divided into shards: {DIVIDE} the DataLoader more workers."
                if supply.loader.iterable
                else ""
            ),
            file=where.file,
            line=where.line,
        )

    def _own_reading(self, profile: Profile, serial: Serial) -> Finding | None:
        """Of a training thread that reads for most of its loading."""
        own = profile.input.own
        if own is None or not may_only_read(own, serial, profile):
            return None
        if has_come_to_keep(profile, serial):
            return None
        assert own.reading_share is not None
        lost_ns = own.reading_share * serial.wait_ns
        if lost_ns <= serial.won_ns and not serial.waits:
            return None  # workers win more
        where, offered = where_loading(profile, serial.loader), serial.won_by(profile)
        return Finding(
            rule=self.name,
            summary=f"The training thread reads for {format_share(own.reading_share)} of its loading,"
            f" which takes {format_share(serial.wait_ns / serial.step_ns)} of each step.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=serial.wait_ns,
            assumption=FOR_NOTHING,
            evidence=(
                *serial.evidence(profile),
                *_read(own),
                "Lines that read, and what is done with files while they are open, take"
                f" {format_share(own.reading_share)} of its loading.",
                *serial.whether_it_computes(profile),
                *where.evidence,
            ),
            fix=(FEW_FILES if _many(own) else f"{READ_LESS} keep what was read.") + serial.or_workers,
            file=where.file,
            line=where.line,
            actions=self.actions if offered else (),
            won_ns=offered,
        )

    def _reading(self, profile: Profile, supply: Supply) -> Finding | None:
        """Of workers that take CPU time to read: they are behind, or keep up and take the CPUs for that."""
        reading = supply.workers.reading
        assert reading is not None and reading.share is not None
        crowded, instead = crowded_ns(profile, supply), ""
        offered: dict[str, float] = {}
        if crowded:
            reading_cpu_ns = reading.share * supply.making_cpu_ns + supply.storage_cpu_ns
            lost_ns = crowded_by_ns(profile, supply, reading_cpu_ns)
            lost = shared(profile, lost_ns)
            low_ns = CROWDED_BOUNDS[0] * lost_ns
            high_ns = CROWDED_BOUNDS[1] * crowded + supply.wait_ns
            vain = format_share(crowded / supply.training_ns)
            waits = f"training wants a CPU in vain {vain}"
        elif supply.behind and not supply.cured_by_workers:
            making = (supply.workers.fetch_ns + supply.workers.collate_ns) * supply.batches
            lost_ns = supply.won_ns(busy_ns=supply.busy_ns - reading.share * making)
            lost = {Phase.DATA_WAIT: lost_ns}
            low_ns, high_ns = 0.5 * lost_ns, supply.wait_ns
            waits = f"the loop waits for batches {format_share(supply.wait_share)}"
            instead, offered = supply.or_workers, won_beside(MORE_WORKERS, profile, supply)
        else:
            return None
        if not lost_ns:
            return None
        where = where_slow(profile, supply.loader)
        return Finding(
            rule=self.name,
            summary=f"Workers spend {format_share(reading.share)} of their time reading, and {waits} of the"
            " time.",
            lost_ns=lost,
            low_ns=low_ns,
            high_ns=high_ns,
            assumption=FOR_NOTHING,
            evidence=(
                *supply.evidence(),
                *((f"For a batch a worker opens {reading.opens:.0f} files.",) if reading.opens else ()),
                *_read(reading),
                "Lines that read, and what is done with files while they are open, take"
                f" {format_share(reading.share)} of the workers' time; they need not wait for it, so that"
                " it takes a CPU.",
                *where.evidence,
            ),
            fix=(FEW_FILES if _many(reading) else f"{READ_LESS} divide it into parts.") + instead,
            file=where.file,
            line=where.line,
            actions=tuple(offered),
            won_ns=offered,
        )


def _only_reads(supply: Supply) -> bool:
    """Whether workers that compute do so to read."""
    reading, workers = supply.workers.reading, supply.workers
    if reading is None or reading.share is None or reading.reads is None or not supply.needs_cpu:
        return False
    return only_reads(reading, reading.share, (workers.fetch_ns + workers.collate_ns) * workers.cpu_share)


def _stands_reading(supply: Supply) -> bool:
    """Whether workers that wait do so where they read: further ones would wait there, too."""
    reading = supply.workers.reading
    return reading is not None and (reading.share or 0.0) >= MOSTLY and not supply.needs_cpu


def _many(read: OwnLoading | Reading) -> bool:
    """Whether each sample lies in many files."""
    return read.samples is not None and opening_reads(read) >= MANY_READS * read.samples


def _read(read: OwnLoading | Reading) -> tuple[str, ...]:
    """Says what is read for a batch, as far as system calls tell."""
    if not read.reads:
        return ()
    much = f" {format_bytes(read.read_bytes)} in" if read.read_bytes else ""
    made = f", to make {format_bytes(read.made_bytes)} of it" if read.made_bytes else ""
    return (f"That takes{much} {read.reads:.0f} system calls that read{made}.",)
