"""Writes a recorded window into the run's folder, in a thread of its own, and tells what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from diagnose.core.deep_window import KIND
from diagnose.launch.deep_window_file import pack
from diagnose.launch.place import place_of

if TYPE_CHECKING:
    from diagnose.hooks._recorder import Recorder
    from diagnose.launch.deep_window_under_way import Window

LONGEST_WRITE_S = 60.0
"""So long the end of the script waits for a trace that is being written: a file system that takes longer
must not hold it up."""


class Writing:
    """Writes the windows of one process, one at a time.

    Args:
        recorder: Gets the events.
        folder: The run's folder.
    """

    def __init__(self, recorder: Recorder, folder: Path) -> None:
        self._recorder = recorder
        self._folder = folder
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether a window is being written."""
        return self._thread is not None

    def begin(self, window: Window) -> None:
        """Begins to write a window whose profiler has stopped."""
        self._thread = threading.Thread(
            target=self._recorder.guarded,
            args=(self._write, window),
            name="diagnose-deep-window",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until it is written, within reason."""
        thread = self._thread
        if thread is not None:
            thread.join(LONGEST_WRITE_S)

    def forget(self) -> None:
        """In a forked child, which has no such thread."""
        self._thread = None

    def _write(self, window: Window) -> None:
        begun = perf_counter_ns()
        rank = place_of(self._recorder.facts)[0]
        stem = f"deep-rank{rank}-step{window.first_step}"
        raw, packed = self._folder / f".{stem}.{os.getpid()}.json", self._folder / f"{stem}.trace.json.gz"
        problem, cut, size = "", False, 0
        try:
            window.profiler.save(raw)
            cut = pack(raw, raw.with_suffix(".gz"))
            raw.with_suffix(".gz").replace(packed)
            size = packed.stat().st_size
        except (OSError, RuntimeError, MemoryError) as error:
            problem = f"the trace could not be written: {error}"
        finally:
            with contextlib.suppress(OSError):
                raw.unlink(missing_ok=True)
        last = self._recorder.steps + 1  # the step that goes on, and where no loader is asked the next
        told = {
            **window.as_json(),
            "rank": rank,
            "trace_file": packed.name,
            "trace_bytes": size,
            "cut": cut,
            "left_out": last + 1 - window.step,
            "spoilt": (window.step, last),
            "pid": os.getpid(),
            "export_ns": perf_counter_ns() - begun,
        }
        try:
            if not problem:  # from here on the window is there, whatever becomes of this process
                beside = self._folder / f".{stem}.{os.getpid()}.window"
                beside.write_text(json.dumps(told), encoding="utf-8")
                beside.replace(self._folder / f"{stem}.window.json")
        except OSError as error:
            problem = f"the trace could not be written: {error}"
        if problem:
            self._recorder.event(KIND, state="undone", last=last, reason=problem)
        else:
            steps = window.seen_step - window.first_step
            self._recorder.event(KIND, state="ended", last=last, steps=steps, cut=cut)
        window.asked.answer(self._recorder, problem)
        self._thread = None
