"""Takes readings of a run to where they are wanted: once, or again and again while it goes on."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import State
from diagnose.core.profile import RunInfo
from diagnose.export._reading import Point, Reading
from diagnose.export.base import Destination, Exporter, Write
from diagnose.store.liveness import liveness
from diagnose.store.runs import read_manifest

EVERY_S = 15.0
"""Four times a minute: what scrapes or draws is no faster, and the script's machine has better to do."""

MAX_KEPT = 10_000
"""Points that wait for a destination that takes none: of ten looks at least."""

SILENT_S = 600.0
"""A run whose processes cannot be asked, as of another machine, is over when it has recorded nothing for so
long."""

NICENESS = 10
"""Training goes first."""


def export_once(folder: Path, destinations: Sequence[Destination]) -> None:
    """Exports a run as it stands, and says on stderr where to.

    Raises:
        DiagnoseError: If one of the destinations cannot be reached, before anything is written, or does not
            take what it is given; those before it have then been written.
    """
    exporters = [destination.exporter() for destination in destinations]
    from diagnose.export._follower import Follower

    reading = Follower(folder).look(is_last=not _goes_on(folder))
    for destination, exporter in zip(destinations, exporters, strict=True):
        target = _target(destination, exporter, reading.profile.run)
        with exporter.open(target, reading.profile.run) as write:
            words = write(reading)
        _say(f"{destination.name}: {words}")


def follow_run(folder: Path, destinations: Sequence[Destination], *, till_stdin_closes: bool) -> bool:
    """Exports a run every `EVERY_S` until it is over, and then once more.

    Where one destination fails, that is said once, and the others go on.

    Args:
        folder: The run's folder.
        destinations: Where to.
        till_stdin_closes: The run is over when stdin is closed, by the process that waits for the script;
            else when its processes are no more, or Ctrl-C is pressed.

    Returns:
        Whether all of it arrived everywhere.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    from diagnose.export._follower import Follower  # which imports for a second or two

    follower = Follower(folder)
    over = _stdin_closes_within if till_stdin_closes else _ends_within(folder)
    kept = [_Kept(destination) for destination in destinations]
    is_last = was_read = False
    try:
        while not is_last:
            is_last = over(EVERY_S)
            was_read = False
            try:
                reading = follower.look(is_last=is_last)
            except Exception as error:  # noqa: BLE001 (a fault of ours, or a torn file: the next look may do)
                _say(f"export: the run could not be read: {_words(error)}")
                continue
            was_read = True
            for each in kept:
                each.take(reading)
    finally:
        for each in kept:
            each.close()
    return was_read and not any(each.failed for each in kept)


class _Kept:
    """One destination, held open for as long as the run goes on.

    Attributes:
        failed: Why it did not take what it was last given; empty if it did.
    """

    def __init__(self, destination: Destination) -> None:
        self._name = destination.name
        self._destination = destination
        self._open = ExitStack()
        self._write: Write | None = None
        self._not_taken: tuple[Point, ...] = ()
        self._words = ""
        self.failed = ""

    def take(self, reading: Reading) -> None:
        """Gives it a reading; what goes wrong is said, and tried anew with the next reading."""
        reading = replace(reading, points=(*self._not_taken, *reading.points)[-MAX_KEPT:])
        try:
            exporter = self._destination.exporter()
            if not (exporter.live or reading.is_last):
                return
            if self._write is None:
                run = reading.profile.run
                target = _target(self._destination, exporter, run)
                self._write = self._open.enter_context(exporter.open(target, run))
            words = self._write(reading)
        except Exception as error:  # noqa: BLE001 (the library's fault or ours: the others go on)
            self._not_taken = reading.points
            self._tell(error)
        else:
            self._not_taken = ()
            self.failed = ""
            self._words = words if reading.is_last else ""

    def close(self) -> None:
        """Makes what it was given complete, whatever went wrong; says where the whole run went."""
        try:
            self._open.close()
        except Exception as error:  # noqa: BLE001 (likewise)
            self._tell(error)
        else:
            if self._words:
                _say(f"{self._name}: {self._words}")

    def _tell(self, error: Exception) -> None:
        words = _words(error)
        if words != self.failed:
            _say(f"export: {self._name} failed: {words}")
        self.failed = words


def _words(error: Exception) -> str:
    if isinstance(error, DiagnoseError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"


def _target(destination: Destination, exporter: Exporter, run: RunInfo) -> str:
    return destination.target if destination.target is not None else exporter.default_target(run)


def _goes_on(folder: Path) -> bool:
    now = liveness(folder)
    silent_s = now.last_record_s
    if silent_s is None:
        silent_s = time.time() - read_manifest(folder).get("started_unix", 0.0)
    return now.state is State.RUNNING or (now.state is State.CANNOT_TELL and silent_s < SILENT_S)


def _ends_within(folder: Path) -> Callable[[float], bool]:
    def ends(seconds: float) -> bool:
        until = time.monotonic() + seconds
        try:
            while _goes_on(folder):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(1.0, left))
        except KeyboardInterrupt:  # how one stops following
            pass
        return True

    return ends


def _stdin_closes_within(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin.buffer], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr, flush=True)
