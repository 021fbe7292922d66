"""Takes what the training thread has recorded to the store, twice a second, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from diagnose.core.ledger import COLUMNS, COMPILE, RECORDER
from diagnose.launch import quota, vitals
from diagnose.launch.device import DeviceReadings
from diagnose.launch.place import number_in, place_of
from diagnose.store.runs import LOST

FLUSH_EVERY_S = 0.5
"""At most this much is lost when the process is killed."""

FLUSH_STEPS = 500
"""Steps packed into one chunk: packing holds the interpreter lock, so in small pieces."""

LONGEST_FLUSH_S = 1.0
"""So long a fork waits for a flush to end; a disk that takes longer must not hold the script up."""


LONGEST_STOP_S = 10.0
"""So long the script's end waits for the last flush: a file system that hangs must not make it hang."""


class Flusher:
    """The thread between one process's recorder and its file.

    Args:
        folder: The run's folder.
        recorder: Where the records are taken from.
        sampler: Gets a new interval with every flush; its totals are written down too.
        state: Returns what else is known of the session.

    Attributes:
        lost: Why records are lost, in words; empty while none are.
        setup_ns: CPU time of the first flush: imports, and the making of the file; and of importing what
            reads the device's driver.
    """

    def __init__(
        self, folder: Path, recorder: Any, sampler: Any, state: Callable[[], dict[str, Any]]
    ) -> None:
        self.lost = ""
        self.setup_ns = 0
        self._folder = folder
        self._recorder = recorder
        self._sampler = sampler
        self._state = state
        self._device = DeviceReadings()
        self._stop = threading.Event()
        self._flushing = threading.RLock()
        self._thread: threading.Thread | None = None
        self._writer: Any = None
        self._spent_ns = 0
        self._flushes = 0
        self._sites = 0
        self._ended_on = 0
        # A notebook's earlier cell may have failed, which is not this run's failure.
        self._failed_before = id(getattr(sys, "last_value", None))

    def start(self) -> None:
        """Begins flushing."""
        self._thread = threading.Thread(target=self._run, name="diagnose-flusher", daemon=True)
        self._thread.start()

    def stop(self, training_thread: int = 0) -> None:
        """Writes what is left and closes the file.

        Args:
            training_thread: Which thread was measured until now, 0 where none was any more: the last
                readings are of it, and the only ones where it trained for less than a flush.
        """
        if self._thread is not None:
            self._ended_on = training_thread
            self._stop.set()
            self._thread.join(LONGEST_STOP_S)
            if self._thread.is_alive():
                self.lost = self.lost or f"the run's folder took nothing for {LONGEST_STOP_S:.0f} s"
                return
            self._device.stop()

    def before_fork(self) -> None:
        """Waits for the flush under way: a child forked while this thread is inside SQLite or an import
        finds their locks held for ever."""
        self._flushing.acquire(timeout=LONGEST_FLUSH_S)

    def after_fork(self) -> None:
        """Lets flushing go on in the parent."""
        with contextlib.suppress(RuntimeError):  # not ours: the flush took too long to wait for
            self._flushing.release()

    def _run(self) -> None:
        with self._flushing:
            import sqlite3

        while True:
            stop = self._stop.wait(FLUSH_EVERY_S)
            begun = time.thread_time_ns()
            try:
                with self._flushing:
                    self._flush(last=stop)
            except (sqlite3.Error, OSError) as error:
                self._lose(error)
            except Exception:  # noqa: BLE001 (an error of ours ends the measuring, not the script)
                self.lost = f"an error of our own: {traceback.format_exc().strip()}"
                self._say_lost()
                return
            setup_ns = self._device.take_setup_ns()
            self.setup_ns += setup_ns
            if self._flushes:
                self._spent_ns += time.thread_time_ns() - begun - setup_ns
            elif self._writer is not None:
                self.setup_ns += time.thread_time_ns() - begun  # imports, and the making of the file
            self._flushes += self._writer is not None
            if stop:
                return

    def _lose(self, error: Exception) -> None:
        """The disk takes no more: measuring stops, the script goes on."""
        safe = self._writer.safe_steps if self._writer is not None else 0
        if not safe and self._writer is not None:
            self._writer.discard()
        what = f"records after step {safe}" if safe else "all records"
        self.lost = f"{error}; {what} are lost"
        self._say_lost()
        while self._recorder.log.take_rows(FLUSH_STEPS):
            self._recorder.log.placed.clear()

    def _say_lost(self) -> None:
        """Says it at once: the script may be killed. The rank's file takes nothing any more; a few bytes
        beside it may still find room. Where only an empty file does, that says it too."""
        self._recorder.switch_off()
        with contextlib.suppress(OSError):
            (self._folder / LOST).write_text(f"{self.lost}.", encoding="utf-8")

    def _flush(self, *, last: bool) -> None:
        from diagnose.hooks._worker_reports import inbox
        from diagnose.store.writer import Writer

        if self.lost:
            return
        recorder = self._recorder
        self._sampler.vary()
        if self._writer is None:
            if not recorder.log.has_rows():
                return  # a helper process that never finishes a step leaves no file
            rank, world_size = place_of(recorder.facts)
            restart = number_in(os.environ, "TORCHELASTIC_RESTART_COUNT") or 0
            self._writer = Writer(self._folder, rank, restart)
            self._writer.set_meta({**_facts(self._writer.journal), "rank": rank, "world_size": world_size})
        writer = self._writer
        self._take_records(writer, last=last)
        if last or len(recorder.met.sites) != self._sites:
            self._sites = len(recorder.met.sites)
            writer.add_sites(_resolved_sites(dict(recorder.met.sites)))
            loaders = (*recorder.facts.get("loaders", ()), *recorder.facts.get("evaluating", ()))
            writer.add_sources(loader["file"] for loader in loaders)
        if training_thread := recorder.thread or self._ended_on:
            compiles = recorder.current == COMPILE  # whose tracing switches a search for NaN on
            readings = {**vitals.read(training_thread), **self._device.read(recorder.facts)}
            if compiles:
                readings.pop("anomaly", None)
            writer.add_vitals(time.perf_counter_ns(), recorder.steps, readings)
        else:
            self._device.stop()
        for report in inbox.receive():
            writer.add_worker(report)
        for look in list(recorder.looks.flushed):
            recorder.guarded(look)
        writer.set_meta({"state": self._state_now(last)})
        if last:
            error = getattr(sys, "last_value", None)
            is_ours = error is not None and id(error) != self._failed_before
            writer.set_meta({"error": type(error).__name__ if is_ours else None})
            writer.close()
        else:
            writer.commit()

    def _take_records(self, writer: Any, *, last: bool) -> None:
        """Takes what the hooks have left in queues."""
        from diagnose.hooks import _worker

        recorder, log = self._recorder, self._recorder.log
        while rows := log.take_rows(FLUSH_STEPS):
            writer.add_steps(rows)
        while recorder.device is not None and (timed := recorder.device.take_rows(FLUSH_STEPS))[1]:
            writer.add_device_steps(*timed)
        writer.add_meetings(_emptied(log.meetings))
        for step, samples in groupby(_emptied(log.placed), key=itemgetter(0)):
            writer.add_samples(step, [(code, _worker.frames(stack), ns) for _, code, stack, ns in samples])
        for stack, ns, off_ns in self._sampler.take_stood():
            writer.add_standing(_worker.frames(stack), ns, off_ns)
        looked = self._sampler.writes.take(last=last)
        writer.set_writing((_worker.frames(stack), *counts) for stack, *counts in looked)
        writer.add_events(_emptied(recorder.events))

    def _state_now(self, last: bool) -> dict[str, Any]:
        recorder, state = self._recorder, self._state()
        return {
            "steps": recorder.steps,
            "counters": {"batches": recorder.log.batches, **recorder.feed.counters},
            "facts": dict(recorder.facts),
            "sampler_ns": self._sampler.cost_ns,
            "samples": self._sampler.count,
            "flusher_ns": self._spent_ns + self._device.spent_ns,
            "updated_unix": time.time(),
            "finished": last,
            **_device(recorder.facts),
            **state,
            "notes": [*state.get("notes", ()), *self._device.notes],
        }


def _emptied(queue: deque[Any]) -> list[Any]:
    """Takes what is in a queue that another thread goes on to fill."""
    return [queue.popleft() for _ in range(len(queue))]


def _facts(journal: str) -> dict[str, Any]:
    """What the process knows of itself once it trains."""
    torch: Any = sys.modules["torch"]
    cuda_in_use = torch.cuda.is_initialized()
    return {
        "columns": COLUMNS,
        "recorder": RECORDER,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": str(torch.__version__),
        "device": "cuda" if cuda_in_use else "cpu",
        "device_name": torch.cuda.get_device_name() if cuda_in_use else "",
        "python": sys.version.split()[0],
        "num_threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine_cpus": os.cpu_count(),
        "cpuset_cpus": quota.cpuset(),
        "journal": journal,
        "elastic": "TORCHELASTIC_RUN_ID" in os.environ,
        "anchor_ns": [time.perf_counter_ns(), time.time_ns()],
    }


def _device(facts: dict[str, Any]) -> dict[str, str]:
    """What the training thread has learnt of the model's device; it stands instead of what `_facts` says of
    any device in use."""
    found = {"device": facts.get("accelerator"), "device_name": facts.get("device", {}).get("name")}
    return {name: told for name, told in found.items() if told}


def _resolved_sites(sites: dict[tuple[str, int, int], int]) -> list[tuple[str, str, int, str, int]]:
    from diagnose.hooks._frames import resolve

    merged: dict[tuple[str, str, int, str], int] = {}
    for (kind, code, instruction), calls in sites.items():
        key = (kind, *resolve(code, instruction))
        merged[key] = merged.get(key, 0) + calls
    return [(*key, calls) for key, calls in merged.items()]
