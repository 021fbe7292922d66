"""Times `collate_fn` on the training thread, for a batch now and then, and counts what it read for it."""

from __future__ import annotations

from time import process_time_ns, thread_time_ns
from typing import Any

from diagnose.hooks._reads import read_so_far
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._worker_readings import bytes_of
from diagnose.hooks.base import hidden, unseen

READ_EVERY = 4
"""Of the batches whose collating is timed, what was read is counted for one in this many: asking for that
takes longer than all the rest. Not for the first, in which modules are imported."""

HELPED = 0.5
"""Part of collating, from which on the time that other threads are on a CPU is that of a pool which
collates: our own take less, and so do torch's that still spin after an operation."""

FETCHED_NS = 1_000_000
"""Fetching that is shorter does not tell what other threads do beside it."""


class CollateClock:
    """Puts itself in the place of one fetcher's `collate_fn` for one batch at a time.

    Args:
        recorder: Its feed's `counters` get what collating took, what of it on a CPU, and the whole wait for
            those batches; the samples in them; what was read for some, and the bytes of these.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._clock, self._counters = recorder.clock, recorder.feed.counters
        self._fetcher: Any = None
        self._collate_fn: Any = None
        self._asked_ns = self._others_ns = 0
        self._read: tuple[int, int] | None = None
        self._timed = hidden(self._wrapper())

    def begin(self, batches: Any) -> None:
        """An iterator of a loader is about to fetch a batch."""
        fetcher = getattr(batches, "_dataset_fetcher", None)  # none when workers fetch
        if fetcher is None or getattr(fetcher, "dataset", None) is not getattr(batches, "_dataset", None):
            return  # what the tuner keeps stands for the script's dataset
        if self._fetcher is not None:
            self.end()  # the batch before was never finished
        self._read = None if (self._counters["collates"] + 1) % READ_EVERY else read_so_far()
        self._fetcher, self._collate_fn = fetcher, fetcher.collate_fn
        fetcher.collate_fn = self._timed
        self._others_ns = process_time_ns() - thread_time_ns()
        self._asked_ns = self._clock()

    def end(self, batch: Any = None) -> None:
        """The batch is there, or will not come."""
        if self._fetcher is None:
            return
        if self._collate_fn is not None:
            self._restore()  # it was not called
            self._fetcher = None
            return
        self._counters["collated_wait_ns"] += self._clock() - self._asked_ns
        self._fetcher = None
        if self._read is None or (read_now := read_so_far()) is None:
            return
        self._counters["read_batches"] += 1
        self._counters["read_bytes"] += read_now[0] - self._read[0]
        self._counters["reads"] += read_now[1] - self._read[1] - 1  # the first look's own
        made = None if batch is None else bytes_of(batch)
        if made is not None:
            self._counters["made_batches"] += 1
            self._counters["made_bytes"] += made

    def _restore(self) -> Any:
        collate_fn, self._collate_fn = self._collate_fn, None
        self._fetcher.collate_fn = collate_fn
        return collate_fn

    def _wrapper(self) -> Any:
        clock, counters = self._clock, self._counters

        def collate(*args: Any, **kwargs: Any) -> Any:
            collate_fn = self._restore()
            if getattr(self._fetcher, "auto_collation", False) and args and isinstance(args[0], list):
                counters["collated_samples"] += len(args[0])
            begun, begun_cpu_ns, begun_all_ns = clock(), thread_time_ns(), process_time_ns()
            # CPUs that other threads were on anyway, while the samples were fetched.
            busy = (begun_all_ns - begun_cpu_ns - self._others_ns) / max(1, begun - self._asked_ns)
            try:
                batch = collate_fn(*args, **kwargs)
            except BaseException as error:
                unseen(error)
                raise
            counters["collates"] += 1
            elapsed_ns, cpu_ns = clock() - begun, thread_time_ns() - begun_cpu_ns
            others_ns = process_time_ns() - begun_all_ns - cpu_ns
            if begun - self._asked_ns >= FETCHED_NS:
                others_ns -= int(busy * elapsed_ns)
            counters["collate_ns"] += elapsed_ns
            counters["collate_cpu_ns"] += cpu_ns
            if others_ns >= HELPED * elapsed_ns:
                counters["collate_cpu_ns"] += max(0, min(others_ns, elapsed_ns - cpu_ns))
            return batch

        return collate
