"""What a DataLoader's worker process measures, and how it tells the training process.

A worker adds to a few counters and sends them, twice a second at most, as one datagram to a socket of the
training process. Sending never blocks and never fails the worker: a datagram that finds no room is left
out, and the next one carries the same running totals.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any

from diagnose.core.ledger import DATA_WAIT, GAP_AFTER_REST
from diagnose.hooks._frames import end_stacks_at, resolve
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._sampler import Sampler
from diagnose.hooks._worker_files import Files
from diagnose.hooks._worker_readings import (
    CpuDelay,
    Helpers,
    History,
    Sightings,
    Slowest,
    Spread,
    pieces_of,
    piped_bytes_of,
)
from diagnose.hooks._worker_reports import address_of, inbox
from diagnose.hooks.base import around, hidden, timed, unseen

SEND_EVERY_NS = 500_000_000
MAX_STACKS = 40
"""Sampled stacks sent at a time, the heaviest first, so that a report fits into one datagram."""
COUNT_EVERY = 16
"""Batches of which one is looked into: batches of one loader are much alike."""

log: WorkerLog | None = None
"""The log of this process, if it is a worker."""


class WorkerLog:
    """Counts what one worker process does.

    Args:
        recorder: The recorder that the worker inherited or made; it measures no loop here, but the sampler
            writes to it.
        worker_id: The loader's number for this worker.
        dataset: What it fetches from.
        queue: What it puts its batches into.
    """

    def __init__(self, recorder: Recorder, worker_id: int, dataset: Any, queue: Any) -> None:
        self._recorder = recorder
        self._counters = recorder.feed.counters
        self._worker_id = worker_id
        self._batches = 0
        self._fetch_ns = 0
        self._cpu_ns = 0
        self._born_ns = self._sent_ns = perf_counter_ns()
        self._cpu_uncounted_ns = process_time_ns()
        self._cpu_mark_ns = 0
        self._pieces = 0
        self._piped_bytes = 0
        self._sent_once = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        parent = multiprocessing.parent_process()
        self._address = address_of(parent.pid if parent is not None and parent.pid else os.getppid())
        self._spread = Spread()
        self._slowest = Slowest()
        self._history = History()
        self._delay = CpuDelay()
        self._helpers = Helpers(queue)
        self._files = Files(recorder)
        self.sightings = Sightings(dataset, worker_id)
        recorder.reset()
        recorder.thread = get_ident()
        self._sampler = Sampler(recorder)
        self._sampler.start()

    def asked(self, indices: Any) -> None:
        """The worker begins to fetch these indices."""
        self._slowest.asked(indices)
        self._files.asked(indices)
        self.sightings.asked(indices)

    def fetch_begins(self) -> None:
        """The worker begins a batch."""
        self._delay.begins()
        if not self._batches:
            self._cpu_uncounted_ns = process_time_ns()  # the worker's start is no batch's
            self._helpers.begin()
        elif self._batches % COUNT_EVERY == 1:  # not the first, in which modules are imported
            self._files.begins()
        self._cpu_mark_ns = thread_time_ns()
        self._recorder.current = DATA_WAIT

    def fetched(self, elapsed_ns: int) -> None:
        """The worker has finished a batch, collate included."""
        self._recorder.current = GAP_AFTER_REST
        cpu_ns = thread_time_ns() - self._cpu_mark_ns
        self._cpu_ns += cpu_ns
        self._delay.ends(max(0, elapsed_ns - cpu_ns))
        self._files.ends()
        self._helpers.ends()
        self._fetch_ns += elapsed_ns
        self._slowest.add(elapsed_ns, self._batches)
        self._batches += 1
        self._spread.add(elapsed_ns)
        if not self._sent_once or perf_counter_ns() - self._sent_ns > SEND_EVERY_NS:
            self.send()

    def made(self, batch: Any) -> None:
        """The worker is about to send this batch."""
        if self._batches % COUNT_EVERY == 1:
            self._pieces = max(self._pieces, pieces_of(batch))
            self._piped_bytes = max(self._piped_bytes, piped_bytes_of(batch))
        self._files.made(batch)

    def send(self) -> None:
        """Sends the running totals, and the stacks sampled since the last time."""
        cpu_ns = process_time_ns()
        self._send(cpu_ns - self._cpu_uncounted_ns - self._cpu_ns)
        self._cpu_uncounted_ns += process_time_ns() - cpu_ns

    def _send(self, rest_cpu_ns: int) -> None:
        now = perf_counter_ns()
        self._sent_ns = now
        self._sent_once = True
        self._sampler.vary()
        busy: dict[tuple[int, ...], int] = {}
        sampled = self._recorder.log.sampled
        for _ in range(len(sampled)):
            _, weight_ns, _, key = sampled.popleft()
            if key[0] == DATA_WAIT:
                busy[key[1:]] = busy.get(key[1:], 0) + weight_ns
        heaviest = sorted(busy.items(), key=lambda item: -item[1])[:MAX_STACKS]
        collate_ns = self._counters["collate_ns"]
        self._history.add(self._batches, self._fetch_ns)
        files = self._files
        report = {
            "pid": os.getpid(),
            "worker": self._worker_id,
            "batches": self._batches,
            "fetch_ns": self._fetch_ns - collate_ns,
            "collate_ns": collate_ns,
            "cpu_ns": self._cpu_ns,
            "rest_cpu_ns": max(0, rest_cpu_ns - (self._helpers.known_ns or 0)),
            "helper_cpu_ns": self._helpers.known_ns,
            "life_ns": now - self._born_ns,
            "delay_ns": self._delay.known_ns,
            "pieces": self._pieces,
            "piped_bytes": self._piped_bytes,
            "opened": [
                files.batches,
                files.samples,
                files.opens,
                files.read_bytes,
                files.made_bytes,
                files.reads,
            ],
            "opening": [[resolve(*place), count] for place, count in files.opening()],
            "spread": self._spread.counts(),
            "longest_ns": self._spread.longest_ns,
            "slowest": self._slowest.kept,
            "history": self._history.points,
            "sightings": self.sightings.seen,
            "stacks": [[frames(key), weight] for key, weight in heaviest],
        }
        with contextlib.suppress(OSError):  # no room, or no one there: the totals come with the next
            self._socket.sendto(json.dumps(report).encode(), self._address)

    def close(self) -> None:
        """Sends a last time and stops sampling."""
        self._sampler.stop()
        self.send()
        self._socket.close()


def frames(key: tuple[int, ...]) -> list[tuple[str, int, str]]:
    """Resolves pairs of `id(code)` and instruction to file, line and function, in the same order."""
    return [resolve(key[i], key[i + 1]) for i in range(0, len(key), 2)]


def told(
    original: Callable[..., Any],
    recorder: Recorder,
    tell: Callable[[Any], None],
    place: int,
    returned: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """Wraps a callable as `around` does: `tell` is told its argument at a place beforehand, and `returned`
    what it returned."""

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > place:
            recorder.guarded(tell, args[place])

    def after(args: tuple[Any, ...], result: Any) -> None:
        if returned is not None:
            recorder.guarded(returned, result)

    return around(original, before, after)


def _with_timed_collate(
    original: Callable[..., None], recorder: Recorder, sightings: Sightings
) -> Callable[..., None]:
    counters = recorder.feed.counters

    def collated(elapsed_ns: int) -> None:
        counters["collates"] += 1
        counters["collate_ns"] += elapsed_ns

    def init(fetcher: Any, *args: Any, **kwargs: Any) -> None:
        original(fetcher, *args, **kwargs)
        collate_timed = timed(fetcher.collate_fn, recorder, collated)
        fetcher.collate_fn = told(collate_timed, recorder, sightings.fetched, 0)
        recorder.guarded(sightings.epoch_begins)

    return hidden(init)


def logged(worker_loop: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Wraps torch's worker loop so that the worker keeps a `WorkerLog`.

    The wrapper keeps the loop's name and module: a spawned worker finds it by these.
    """

    def begin(dataset: Any, worker_id: int, queue: Any) -> None:
        global log
        end_stacks_at(loop.__code__)
        inbox.close()  # a forked worker's copy would keep the address taken when the training process ends
        log = WorkerLog(recorder, worker_id, dataset, queue)
        # This process is a worker until it ends, so these are never taken out again.
        from torch.utils.data._utils import fetch

        base: Any = fetch._BaseDatasetFetcher
        base.__init__ = _with_timed_collate(base.__init__, recorder, log.sightings)
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            fetch_timed = timed(fetcher.fetch, recorder, log.fetched, log.fetch_begins)
            fetcher.fetch = told(fetch_timed, recorder, log.asked, 1, log.made)  # type: ignore[method-assign]

    def loop(*args: Any, **kwargs: Any) -> Any:
        recorder.thread = 0  # whatever model the dataset may call, this is no training loop
        dataset = args[1] if len(args) > 1 else kwargs.get("dataset")
        worker_id = args[10] if len(args) > 10 else kwargs.get("worker_id", 0)
        queue = args[3] if len(args) > 3 else kwargs.get("data_queue")
        recorder.guarded(begin, dataset, worker_id, queue)
        try:
            return worker_loop(*args, **kwargs)
        except BaseException as error:
            unseen(error)
            raise
        finally:
            if log is not None:
                recorder.guarded(log.close)

    loop.__module__ = worker_loop.__module__
    loop.__name__ = worker_loop.__name__
    loop.__qualname__ = worker_loop.__qualname__
    return loop
