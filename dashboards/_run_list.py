"""The list of runs, kept by a thread: callbacks take what it has, and wait for no file."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from time import monotonic

from diagnose.dashboards._analyst import Analysis, Analyst, Answer
from diagnose.dashboards._listed import ListedRun, RunRow

from diagnose.core.liveness import State
from diagnose.core.profile import Profile
from diagnose.store.runs import NAME

LIST_EVERY_S = 1.0
UNWATCHED_S = 15.0
"""A list that nobody has looked at for so long is not kept until somebody looks again."""

FIRST_LOOK_S = 0.3
"""So long the first to ask waits: the names of hundreds of runs are there by then."""

PUBLISH_EVERY_S = 0.25
"""While many runs are read for the first time, what is there is shown so often."""

OTHER_RANKS_S = 0.05
"""So much of a second goes to ranks other than the first: with a thousand of them each has its turn."""

MAX_LISTED = 500
"""Of more runs only the newest are listed."""

AGAIN = 25
"""So many of the runs that are over are looked at again each second, in turn: all of them in twenty."""

MAX_VERDICTS = 25
"""So many of the newest runs are analysed for the list when they have ended, one after the other."""

logger = logging.getLogger(__name__)


class RunList:
    """The runs under one folder, the newest first.

    Args:
        root: The folder.
        analyst: Asks the rules.

    Attributes:
        has_listed: Whether the folder was looked into: before, that there are none means nothing.
    """

    def __init__(self, root: Path, analyst: Analyst) -> None:
        self.has_listed = False
        self._root = root
        self._analyst = analyst
        self._known: dict[str, ListedRun] = {}
        self._again = 0
        self._first_of_others = 0
        self._verdicts: dict[tuple[str, tuple[int, ...]], Profile | None] = {}
        self._rows: tuple[RunRow, ...] = ()
        self._looked_at = monotonic()
        self._looked = threading.Event()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def rows(self) -> tuple[RunRow, ...]:
        """Returns what is known of each run. Waits a moment for the first look, and for nothing later."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="dashboard-list", daemon=True)
                self._thread.start()
        if monotonic() - self._looked_at > UNWATCHED_S:
            self._ready.clear()
        self._looked_at = monotonic()
        self._looked.set()
        self._ready.wait(FIRST_LOOK_S)
        return self._rows

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._looked.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # -- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            begun = monotonic()
            try:
                self._turn()
            except Exception:  # a fault of ours must not end the list
                logger.exception("listing %s failed", self._root)
            self._ready.set()
            if monotonic() - self._looked_at > UNWATCHED_S:
                self._looked.clear()
                if monotonic() - self._looked_at > UNWATCHED_S:
                    self._looked.wait()
            self._closed.wait(max(0.0, begun + LIST_EVERY_S - monotonic()))

    def _turn(self) -> None:
        """Reads what has changed, the newest run first, and publishes now and then."""
        runs = self._find()
        self._publish(runs)
        published = monotonic()
        over = [run for run in runs if not run.needs_look]
        begin = self._again = self._again % max(1, len(over))
        again = {run.folder for run in (over + over)[begin : begin + min(AGAIN, len(over))]}
        self._again += AGAIN
        for run in runs:
            if self._closed.is_set():
                return
            if run.needs_look or run.folder in again:
                run.look()
            if monotonic() - published > PUBLISH_EVERY_S:
                self._publish(runs)
                self._ready.set()
                published = monotonic()
        self._look_at_others(runs, again)
        self._publish(runs)

    def _look_at_others(self, runs: list[ListedRun], again: set[Path]) -> None:
        """Reads ranks other than the first, of each run in its turn: one with thousands leaves time."""
        changing = [run for run in runs if run.has_unread or not run.is_over or run.folder in again]
        begin = self._first_of_others = (self._first_of_others + 1) % max(1, len(changing))
        until = monotonic() + OTHER_RANKS_S
        for run in changing[begin:] + changing[:begin]:
            run.look_at_others(until)

    def _find(self) -> list[ListedRun]:
        """Returns the newest runs. Those of before whose folders are gone are forgotten."""
        try:
            with os.scandir(self._root) as entries:
                names = [entry.name for entry in entries if NAME.fullmatch(entry.name)]
        except OSError:
            names = []
        found = {name: self._known.get(name) or ListedRun(self._root / name) for name in names}
        self._known = {name: run for name, run in found.items() if run.look_at_manifest()}
        newest = sorted(
            self._known.values(), key=lambda run: (run.begun_unix, run.folder.name), reverse=True
        )
        return newest[:MAX_LISTED]

    def _publish(self, runs: list[ListedRun]) -> None:
        self._rows = tuple(self._judged(place, run) for place, run in enumerate(runs))
        self.has_listed = True

    def _judged(self, place: int, run: ListedRun) -> RunRow:
        """Returns the row, of a run that has ended with its verdict; of the newest it is asked for."""
        if run.row.state is not State.ENDED:
            return run.row
        key = (run.folder.name, run.stamp)
        if key not in self._verdicts and place < MAX_VERDICTS:
            self._verdicts[key] = None

            def told(answer: Answer) -> None:
                self._verdicts[key] = answer.profile if isinstance(answer, Analysis) else None

            self._analyst.analyse(run.folder, told, urgent=False)
        profile = self._verdicts.get(key)
        return run.row.judged(profile) if profile is not None else run.row
