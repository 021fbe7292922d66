"""The ranks of a run, each made a summary of and let go."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from diagnose.analysis.across import Across
from diagnose.analysis.device_ledger import by_device_clock
from diagnose.analysis.rank_summary import RankSummary, Window, summarize
from diagnose.analysis.script import Script
from diagnose.store.reader import RankLog, read_rank


@dataclass(slots=True, kw_only=True)
class Reduced:
    """Some ranks of a run, each known by its place among the files of all.

    Attributes:
        ranks: Those that recorded steps.
        across: Their steps side by side; `None` without a rank.
        damage: What of their files could not be read, in words.
    """

    ranks: dict[int, RankSummary] = field(default_factory=dict)
    across: Across | None = None
    damage: dict[int, list[str]] = field(default_factory=dict)

    def add(self, place: int, log: RankLog, window: Window, script: Script) -> None:
        """Takes a rank in that is not there yet."""
        script.sources.know(log.sources)
        if len(log.steps):
            summary, across = summarize(log, place, window, script)
            self.fold(Reduced(ranks={place: summary}, across=across))

    def fold(self, other: Reduced) -> None:
        """Takes other ranks in; `other` is used up."""
        self.ranks |= other.ranks
        self.damage |= other.damage
        if self.across is None:
            self.across = other.across
        elif other.across is not None:
            self.across.fold(other.across)


def reduce_logs(logs: Iterable[tuple[int, RankLog]], window: Window, script: Script) -> Reduced:
    """Summarizes ranks, each given with its place."""
    reduced = Reduced()
    for place, log in logs:
        reduced.add(place, log, window, script)
    return reduced


def reduce_files(files: Iterable[tuple[int, Path]], window: Window, script: Script) -> Reduced:
    """Reads and summarizes ranks one after the other, each given with its place.

    Raises:
        DiagnoseError: If a file was written by a newer version.
    """
    reduced = Reduced()
    for place, path in files:
        log, damage = read_or_note(path, window)
        if damage:
            reduced.damage[place] = damage
        if log is not None:
            reduced.add(place, log, window, script)
    return reduced


def read_or_note(path: Path, window: Window | None = None) -> tuple[RankLog | None, list[str]]:
    """Reads a rank's file, briefly where only a window of it is wanted; and what cannot be read, in words.

    Raises:
        DiagnoseError: If it was written by a newer version.
    """
    brief_from = window.warmup if window is not None and window.part is None else None
    try:
        log = read_rank(path, brief_from=brief_from)
    except sqlite3.DatabaseError as error:
        return None, [f"{path.name} cannot be read ({error}); its steps are missing."]
    return by_device_clock(log), log.notes
