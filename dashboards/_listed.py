"""A run as a row of the list: what can be said of it without reading all of its steps."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from diagnose.dashboards._composed import words

from diagnose.analysis.run_info import why_lost
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.liveness import Liveness, State
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_MS, NS_PER_S
from diagnose.store.liveness import liveness
from diagnose.store.runs import rank_files, read_lost, read_manifest
from diagnose.store.tail import look

NEWEST_CHUNKS = 100
"""The step time of a run that goes on is the mean of so many flushes, some 50 seconds."""

SILENT_S = 60.0
"""A run of another machine that left no record for so long is looked at seldom: it may be long dead."""

SAMPLES = COLUMNS.index("samples")

Stamp = tuple[int, ...]
"""What changes when a file does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of the list.

    Attributes:
        id: Its name.
        script: As the user typed it.
        argv: The script's arguments.
        started: When, ISO 8601.
        state: Whether it goes on.
        words: The same in words.
        num_steps: Steps of the first rank.
        world_size: Ranks that recorded steps; those whose files have not been read yet count.
        step_ms: Mean step: of the measured ones once the run is analysed, else of the newest.
        samples_per_s: Likewise, of all ranks together; those not read yet count as the others do.
        tuned: Whether it was tuned.
        verdict: The most costly finding; empty until it is analysed, or where there is none.
        note: What is wrong with its files.
        is_read: Whether anything but `run.json` was looked at.
    """

    id: str
    script: str = ""
    argv: tuple[str, ...] = ()
    started: str = ""
    state: State = State.CANNOT_TELL
    words: str = "being read"
    num_steps: int = 0
    world_size: int = 1
    step_ms: float | None = None
    samples_per_s: float | None = None
    tuned: bool = False
    verdict: str = ""
    note: str = ""
    is_read: bool = False

    def judged(self, profile: Profile) -> RunRow:
        """Returns the row with what the analysis says."""
        known = profile.steps.mean_ns is not None
        return replace(
            self,
            verdict=profile.findings[0].summary if profile.findings else "",
            step_ms=profile.step_time_ns / NS_PER_MS if known else self.step_ms,
            samples_per_s=(profile.throughput.samples_per_s if known else None) or self.samples_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What the list takes from a rank's file.

    Attributes:
        stamp: The file's, when it was read.
        num_steps: Steps in it.
        step_ns: Mean of the newest; `None` where there are none.
        samples_per_s: Likewise.
        tuned: Whether tuning left an event.
        meta: What the rank says of itself.
        note: Why it cannot be read, or what of it is damaged.
    """

    stamp: Stamp
    num_steps: int = 0
    step_ns: float | None = None
    samples_per_s: float = 0.0
    tuned: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


class ListedRun:
    """One run, read again as far as its files change: of many ranks the first, the others in turn.

    Args:
        folder: The run's.

    Attributes:
        folder: Likewise.
        row: What is known.
        begun_unix: When it was started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.row = RunRow(id=folder.name)
        self.begun_unix = 0.0
        self._manifest: dict[str, Any] = {}
        self._manifest_stamp: Stamp = ()
        self._is_new = True
        self._paths: list[Path] = []
        self._ranks: dict[Path, RankRow] = {}
        self._turn = 0
        self._is_silent = True

    @property
    def stamp(self) -> Stamp:
        """What changes with `run.json` and the first rank's file."""
        first = self._ranks.get(self._paths[0]) if self._paths else None
        return (*self._manifest_stamp, *(first.stamp if first is not None else ()))

    @property
    def is_over(self) -> bool:
        """Whether its files are not expected to change any more."""
        silent = self.row.state is State.CANNOT_TELL and self._is_silent
        return self.row.is_read and (silent or self.row.state in (State.ENDED, State.GONE))

    @property
    def needs_look(self) -> bool:
        """Whether to look at once: it goes on, or its `run.json` is new."""
        return self._is_new or not self.is_over

    @property
    def has_unread(self) -> bool:
        """Whether there are ranks that have not been read once."""
        return self.row.is_read and len(self._ranks) < len(self._paths)

    def look_at_manifest(self) -> bool:
        """Reads `run.json` if it has changed; says whether there is one."""
        stamp = _stamp(self.folder / "run.json")
        if stamp and stamp != self._manifest_stamp:
            self._manifest, self._manifest_stamp, self._is_new = read_manifest(self.folder), stamp, True
            begun = self._manifest.get("started_unix")
            self.begun_unix = float(begun) if isinstance(begun, int | float) else 0.0
            if not self.row.is_read:
                self.row = replace(self.row, **self._told())
        return bool(stamp)

    def look(self) -> None:
        """Reads the first rank's file, if it has changed, and tells how the run stands."""
        self._paths = rank_files(self.folder)
        self._ranks = {path: self._ranks[path] for path in self._paths if path in self._ranks}
        if self._paths:
            self._read(self._paths[0])
        self._is_new = False
        self._tell()

    def look_at_others(self, until: float) -> None:
        """Reads the files of the other ranks that have changed, each in its turn.

        Args:
            until: No further file is begun after this time of the monotonic clock.
        """
        others = self._paths[1:]
        changed = False
        for _ in others:
            if monotonic() > until:
                break
            self._turn = (self._turn + 1) % len(others)
            changed |= self._read(others[self._turn])
        if changed:
            self._tell()

    def _read(self, path: Path) -> bool:
        stamp = (*_stamp(path), *_stamp(Path(f"{path}-wal")))
        known = self._ranks.get(path)
        if known is not None and known.stamp == stamp:
            return False
        self._ranks[path] = rank_row(path, stamp)
        return True

    def _stands(self) -> Liveness:
        known = [self._ranks[path].meta for path in self._paths if path in self._ranks]
        found = liveness(self.folder, known)
        # That it goes on, or is not closed on another machine, one rank tells as well as all.
        if len(known) == len(self._paths) or found.state in (State.RUNNING, State.CANNOT_TELL):
            return found
        return found if self._manifest.get("ended_unix") else liveness(self.folder)

    def _told(self) -> dict[str, Any]:
        argv = self._manifest.get("argv")
        return {
            "script": str(self._manifest.get("script", "")),
            "argv": tuple(map(str, argv)) if isinstance(argv, list) else (),
            "started": str(self._manifest.get("started", "")),
        }

    def _tell(self) -> None:
        live = self._stands()
        self._is_silent = live.last_record_s is None or live.last_record_s > SILENT_S
        read = [self._ranks[path] for path in self._paths if path in self._ranks]
        trained = [rank for rank in read if rank.num_steps]
        first = trained[0] if trained else RankRow(stamp=())
        unread = len(self._paths) - len(read)
        rate = sum(rank.samples_per_s for rank in trained)
        if trained:
            rate *= (len(trained) + unread) / len(trained)
        lost = why_lost({**self._manifest, "lost": read_lost(self.folder)})
        self.row = RunRow(
            id=self.folder.name,
            **self._told(),
            state=live.state,
            words=words(self.folder.name, self._manifest, live, first.meta),
            num_steps=first.num_steps,
            world_size=max(1, len(trained) + (unread if trained else 0)),
            step_ms=first.step_ns / NS_PER_MS if first.step_ns else None,
            samples_per_s=rate or None,
            tuned=any(rank.tuned for rank in read),
            note=next(filter(None, (lost, *(rank.note for rank in read))), ""),
            is_read=True,
        )


def rank_row(path: Path, stamp: Stamp) -> RankRow:
    """Reads of a rank's file what the list tells; whatever is damaged is left out and noted."""
    try:
        with look(path) as file:
            num_steps, meta = file.num_steps(), file.meta()
            chunks = file.chunks_before(num_steps, NEWEST_CHUNKS)
            tuned = bool(file.events_after(0, ("tuning",), 1))
            note = "; ".join(dict.fromkeys(file.damaged))
    except (sqlite3.DatabaseError, ValueError, OSError) as error:
        return RankRow(stamp=stamp, note=f"{path.name} cannot be read ({error})")
    time_ns = sum(sum(chunk.totals[len(COUNTS) :]) for chunk in chunks)
    count = sum(chunk.num_steps for chunk in chunks)
    samples = sum(chunk.totals[SAMPLES] for chunk in chunks)
    return RankRow(
        stamp=stamp,
        num_steps=num_steps,
        step_ns=time_ns / count if count else None,
        samples_per_s=samples * NS_PER_S / time_ns if time_ns else 0.0,
        tuned=tuned,
        meta=meta,
        note=note,
    )


def _stamp(path: Path) -> Stamp:
    """Returns what changes when a file does; nothing where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino)
