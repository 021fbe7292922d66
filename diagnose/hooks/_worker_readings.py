"""What else a worker knows of its batches: how their times are spread, what it read, and what it owns."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import log2
from pathlib import Path
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any

import torch

from diagnose.core.workers import PER_OCTAVE
from diagnose.hooks._batch import PLAIN
from diagnose.hooks._checksum import checksum
from diagnose.hooks._held import attributes_of, has, values_of

POINTS = 32
"""Points of the history at most; when it is full, every second one goes, then they come half as often."""

POINT_EVERY_NS = 2_000_000_000
"""Between the first points. Reading what memory is shared takes a millisecond per gigabyte."""

WATCHED = 4
"""Samples of the dataset that are compared with themselves when they come again."""

MAX_SIGHTINGS = 16

MAX_DEPTH = 4

MAX_PIECES = 1000
"""A batch of so many is not counted further."""

NUMBER_BYTES = 8
"""As a tensor holds one, an integer or a double."""

MAX_SLOWEST = 5
"""Batches of which it is kept what was in them."""

MAX_INDICES = 64
"""Of the samples in such a batch so many are named."""


class Spread:
    """A histogram of times, by powers of two and parts of them."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.longest_ns = 0

    def add(self, elapsed_ns: int) -> None:
        """Counts one time."""
        bucket = int(PER_OCTAVE * log2(elapsed_ns)) if elapsed_ns > 1 else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.longest_ns = max(self.longest_ns, elapsed_ns)

    def counts(self) -> list[tuple[int, int]]:
        """Returns buckets and how many times fell into each, in order."""
        return sorted(self._counts.items())


class Slowest:
    """The batches that took longest, with what was asked for in them. Any other batch costs a comparison.

    Attributes:
        kept: Nanoseconds, when it was there (`time.perf_counter_ns`), how many batches the worker had made
            before, how many samples it holds (`None` where nobody says), and the indices of the first ones.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[int, int, int, int | None, list[int]]] = []
        self._least_ns = 0
        self._asked: Any = None

    def asked(self, indices: Any) -> None:
        """The worker begins to fetch these indices: a list, or one of them for a whole batch."""
        self._asked = indices

    def add(self, elapsed_ns: int, before: int) -> None:
        """The batch is there, after the worker has made so many others."""
        if elapsed_ns <= self._least_ns:
            return
        asked = self._asked
        indices = asked if isinstance(asked, list) else [asked]
        named: list[int] = []
        for each in indices[:MAX_INDICES]:
            with contextlib.suppress(TypeError):  # a stream asks for nothing, a sampler for anything
                named.append(operator.index(each))
        count = len(asked) if isinstance(asked, list) else None
        self.kept.append((elapsed_ns, perf_counter_ns(), before, count, named))
        if len(self.kept) > MAX_SLOWEST:
            self.kept.remove(min(self.kept))
            self._least_ns = min(self.kept)[0]


class History:
    """How batches, bytes read and memory grew over the worker's life, in a few points."""

    def __init__(self) -> None:
        self.points: list[tuple[int, int, int, int | None, int | None]] = []
        self._every_ns = POINT_EVERY_NS

    def add(self, batches: int, busy_ns: int) -> None:
        """Adds a point if it is time: the time, batches, busy nanoseconds, bytes read from storage so far,
        bytes of memory that no other process shares."""
        now = perf_counter_ns()
        if self.points and now - self.points[-1][0] < self._every_ns:
            return
        self.points.append((now, batches, busy_ns, read_bytes(), private_bytes()))
        if len(self.points) > POINTS:
            self.points = self.points[::2]
            self._every_ns *= 2


class Sightings:
    """Checksums of a few samples, each time they are fetched: the same sample may come out the same.

    Args:
        dataset: The worker's dataset. Of a stream the first samples of each epoch are watched, which each
            worker has of its own.
        worker_id: The loader's number of the worker.
    """

    def __init__(self, dataset: Any, worker_id: int = 0) -> None:
        self._worker_id = worker_id
        self._begins = False  # no batch of the epoch has been asked for
        length = 0
        with contextlib.suppress(Exception):  # whatever the script's own `__len__` raises
            length = len(dataset) if hasattr(dataset, "__getitem__") else 0
        self._watched = {part * length // WATCHED for part in range(WATCHED)} if length else set()
        self._wanted: list[tuple[int, int]] = []
        self.seen: list[tuple[int, int]] = []

    def epoch_begins(self) -> None:
        """The worker begins to go through its dataset."""
        self._begins = True

    def asked(self, indices: Any) -> None:
        """The worker begins to fetch these indices: a list, or one of them for a whole batch."""
        self._wanted = []
        begins, self._begins = self._begins, False
        if isinstance(indices, list) and indices and indices[0] is None:  # of a stream: what comes next
            if begins and len(self.seen) < MAX_SIGHTINGS:
                first = self._worker_id * WATCHED
                self._wanted = [(first + place, place) for place in range(min(WATCHED, len(indices)))]
        elif self._watched and len(self.seen) < MAX_SIGHTINGS:
            if isinstance(indices, list):
                with contextlib.suppress(TypeError):  # a sampler asks for anything, also what has no hash
                    if not self._watched.isdisjoint(indices):
                        places = {index: place for place, index in enumerate(indices)}
                        self._wanted = [(index, places[index]) for index in self._watched & places.keys()]
            elif isinstance(indices, int) and indices in self._watched:
                self._wanted = [(indices, -1)]

    def fetched(self, samples: Any) -> None:
        """The samples asked for, before they are collated."""
        for index, place in self._wanted[: len(samples)] if isinstance(samples, list) else self._wanted:
            sum_ = checksum(samples if place < 0 else samples[place])
            if sum_ is not None:
                self.seen.append((index, sum_))
        self._wanted = []


class CpuDelay:
    """How long the main thread was ready to run and had no CPU while it made batches."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self.total_ns = 0
        self._mark_ns = 0

    def begins(self) -> None:
        """The worker begins a batch."""
        self._mark_ns = self._now_ns()

    def ends(self, most_ns: int) -> None:
        """The worker has made it, and was off the CPU for so long meanwhile: what it waited for one as it
        asked for its delay is no part of that."""
        self.total_ns += min(most_ns, self._now_ns() - self._mark_ns)

    @property
    def known_ns(self) -> int | None:
        """The delay in all batches so far; `None` where the kernel does not tell."""
        return self.total_ns if self._file >= 0 else None

    def _now_ns(self) -> int:
        # Read from an open file: a few microseconds, twice per batch.
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0


class Helpers:
    """CPU time of the threads that neither are the main one nor send batches: teams of BLAS or OpenMP,
    decoders, a pool of the script's own. They compute for the dataset.

    Args:
        queue: The queue of `multiprocessing` that batches are put into. Its thread, which pickles and sends
            them, begins with the first one.

    Attributes:
        known_ns: That time up to the last batch made; `None` where it cannot be told from that of sending.
    """

    def __init__(self, queue: Any) -> None:
        self.known_ns: int | None = None
        self._queue = queue
        self._file = -1
        self._mark_ns = 0

    def begin(self) -> None:
        """The worker begins its first batch."""
        self._mark_ns = process_time_ns() - thread_time_ns()

    def ends(self) -> None:
        """The worker has made a batch."""
        sending_ns = self._sending_ns()
        if sending_ns is not None:
            others_ns = process_time_ns() - thread_time_ns() - self._mark_ns
            self.known_ns = max(0, others_ns - sending_ns)

    def _sending_ns(self) -> int | None:
        if not hasattr(self._queue, "_thread"):
            return None
        if self._queue._thread is None:
            return 0
        try:
            if self._file < 0:
                name = f"/proc/self/task/{self._queue._thread.native_id}/schedstat"
                self._file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            # A thread that runs has run; 0 is a kernel that does not count.
            return int(os.pread(self._file, 64, 0).split()[0]) or None
        except OSError:
            return None


def read_bytes() -> int | None:
    """Returns how much this process has had read from storage; what the page cache held is not counted."""
    return _field("/proc/self/io", "read_bytes:")


def private_bytes() -> int | None:
    """Returns the memory that this process has written to and shares with no other."""
    kib = _field("/proc/self/smaps_rollup", "Private_Dirty:")
    return None if kib is None else 1024 * kib


def _field(file: str, name: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)


def pieces_of(batch: Any) -> int:
    """Returns how many objects a batch is pickled as: its tensors, texts and numbers, and what holds them.

    Counts up to `MAX_PIECES`.
    """
    return sum(1 for _ in _parts_of(batch))


def piped_bytes_of(batch: Any) -> int:
    """Returns the bytes of a batch's arrays and texts: those go through a pipe, and those of tensors
    through shared memory. Counts up to `MAX_PIECES` parts."""
    total = 0
    for part in _parts_of(batch):
        if isinstance(part, str | bytes | bytearray):
            total += len(part)
        elif type(part) not in PLAIN and _is_array(part) and not isinstance(part, torch.Tensor):
            total += part.nbytes
    return total


def bytes_of(batch: Any) -> int | None:
    """Returns the bytes of a batch's tensors, texts and numbers; `None` where it has too many parts to
    count, or one does not say."""
    pieces = total = 0
    for part in _parts_of(batch):
        pieces += 1
        if isinstance(part, str | bytes | bytearray):
            total += len(part)
        elif isinstance(part, int | float):
            total += NUMBER_BYTES
        elif has(part, "shape"):
            if not _is_array(part):
                return None
            try:
                total += part.nbytes
            except RuntimeError:  # a sparse tensor has none
                return None
    return total if pieces < MAX_PIECES else None


def _parts_of(batch: Any) -> Iterator[Any]:
    pieces, left = 0, [(batch, 0)]
    while left and pieces < MAX_PIECES:
        part, depth = left.pop()
        pieces += 1
        yield part
        if depth < MAX_DEPTH:
            left.extend((held, depth + 1) for held in islice(_held_by(part), MAX_PIECES))


def _held_by(part: Any) -> Iterable[Any]:
    if isinstance(part, Mapping):
        return values_of(part)
    if isinstance(part, list | tuple | set | frozenset):
        return part
    if type(part) in PLAIN:
        return ()
    # Tensors and arrays are sent whole, whatever else is hung on them.
    return () if has(part, "shape") else attributes_of(part).values()


def _is_array(part: Any) -> bool:
    """Whether it is a tensor or an array, which know their size, and no object of the script's that may
    have to find out."""
    return isinstance(part, torch.Tensor) or has(part, "__array__", "nbytes")
