"""Rules of what slows down loading, whoever does it: workers, or the training thread where workers would
not win most of it. A rule's page lists this file's thresholds, too."""

from __future__ import annotations

from typing import ClassVar

from diagnose.core.input import OwnLoading, Reading
from diagnose.core.profile import Profile
from diagnose.rules._serial import Serial, has_other_cause
from diagnose.rules._supply import main_loader
from diagnose.rules.base import Rule

MOSTLY = 0.5
"""Part of the time of whoever loads that passes where they read."""

MAX_BYTE_NS = 5.0
"""CPU time for each byte read. Copying from the page cache takes below 1, splitting text into lines some 3;
parsing numbers and decoding take 10 and more."""

MAX_READ_NS = 150_000
"""Time of a system call of the training thread that reads, opening and closing included: half of what a
file takes."""

FILE_READS = 2.0
"""Of them a file takes at least: the second finds its end."""

BUFFER_BYTES = 8192
"""What one of them reads of a text that comes line by line: such calls open nothing. Of a file opened as
bytes it may be half of that."""

KEPT = 0.5
"""Where loading has come to take less than this part of its mean, the dataset keeps what it has made."""


class LoadingRule(Rule):
    """A rule that applies where workers feed the loop, and where its training thread does so and they would
    not be the cure.

    Attributes:
        own_needs: What it needs of the training thread, instead of `needs`.
    """

    own_needs: ClassVar[tuple[str, ...]] = ()

    def applies(self, profile: Profile) -> bool:
        loader = main_loader(profile)
        return loader is not None and (loader.num_workers > 0 or has_other_cause(profile))

    def needed(self, profile: Profile) -> tuple[str, ...]:
        loader = main_loader(profile)
        return self.needs if loader is not None and loader.num_workers else self.own_needs


def opening_reads(read: OwnLoading | Reading) -> float:
    """Returns how many of the calls that read for a batch can have opened a file, or found its end: not
    those that fill whole buffers, but for one file of each sample."""
    reads = read.reads or 0.0
    filling = (read.read_bytes or 0.0) / BUFFER_BYTES
    return max(reads - filling, min(reads, FILE_READS * (read.samples or 0.0)))


def only_reads(read: OwnLoading | Reading, share: float, cpu_ns: float) -> bool:
    """Whether reading is most of the CPU time of whoever loads: it passes where files are read, and takes
    no longer than reading them does, or it is a data base or an archive that takes it. Else it is what is
    made of them that takes it. Where calls were not counted nobody can say so.

    Args:
        read: What is read for a batch.
        share: Part of the time that passes where files are read.
        cpu_ns: The CPU time of making a batch.
    """
    if read.reads is None or (read.asking_share or 0.0) >= MOSTLY:
        return share >= MOSTLY
    most_ns = MAX_READ_NS * opening_reads(read) + MAX_BYTE_NS * (read.read_bytes or 0.0)
    return share >= MOSTLY and share * cpu_ns <= most_ns


def may_only_read(own: OwnLoading, serial: Serial, profile: Profile) -> bool:
    """Whether reading may be most of the training thread's loading; it may where no lines were seen."""
    share = 1.0 if own.reading_share is None else own.reading_share
    cpu_ns = 0.0 if serial.waits else serial.wait_ns / (profile.input.batches_per_step or 1.0)
    return only_reads(own, share, cpu_ns)


def has_come_to_keep(profile: Profile, serial: Serial) -> bool:
    """Whether loading takes far less in the end than at first: the cure is there already."""
    late_ns = profile.input.late_wait_ns
    return late_ns is not None and late_ns < KEPT * serial.wait_ns
