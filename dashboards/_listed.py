"""A run as a row of the list: what can be said of it without reading all of its steps."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

from diagnose.dashboards._composed import words

from diagnose.analysis.run_info import why_lost
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.liveness import State
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_MS, NS_PER_S
from diagnose.store.liveness import liveness
from diagnose.store.runs import LOST, rank_files, read_lost, read_manifest
from diagnose.store.tail import look

NEWEST_CHUNKS = 100
"""The step time of a run that goes on is the mean of so many flushes, some 50 seconds."""

SAMPLES = COLUMNS.index("samples")


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
        world_size: Ranks that recorded steps.
        step_ms: Mean step: of the measured ones once the run is analysed, else of the newest.
        samples_per_s: Likewise, of all ranks together.
        tuned: Whether it was tuned.
        verdict: The most costly finding; empty until it is analysed, or where there is none.
        note: What is wrong with its files.
    """

    id: str
    script: str = ""
    argv: tuple[str, ...] = ()
    started: str = ""
    state: State = State.CANNOT_TELL
    words: str = ""
    num_steps: int = 0
    world_size: int = 1
    step_ms: float | None = None
    samples_per_s: float | None = None
    tuned: bool = False
    verdict: str = ""
    note: str = ""

    def judged(self, profile: Profile) -> RunRow:
        """Returns the row with what the analysis says."""
        known = profile.steps.mean_ns is not None
        return replace(
            self,
            verdict=profile.findings[0].summary if profile.findings else "",
            step_ms=profile.step_time_ns / NS_PER_MS if known else self.step_ms,
            samples_per_s=(profile.throughput.samples_per_s if known else None) or self.samples_per_s,
        )


def stamp_of(folder: Path) -> tuple[int, ...]:
    """Returns what changes when a run's files do."""
    found = []
    for path in (folder / "run.json", folder / LOST, *rank_files(folder)):
        try:
            status = os.stat(path)
        except OSError:
            continue
        found += [status.st_mtime_ns, status.st_size]
    return tuple(found)


def row_of(folder: Path) -> RunRow:
    """Reads a run's row; whatever is damaged is left out and noted."""
    manifest, live = read_manifest(folder), liveness(folder)
    steps, note, meta = 0, why_lost({**manifest, "lost": read_lost(folder)}), {}
    step_ns, rates, trained, tuned = None, 0.0, 0, False
    for path in rank_files(folder):
        try:
            with look(path) as file:
                own, facts = file.num_steps(), file.meta()
                chunks = file.chunks_before(own, NEWEST_CHUNKS)
                tuned = tuned or bool(file.events_after(0, ("tuning",), 1))
                note = note or "; ".join(dict.fromkeys(file.damaged))
        except (sqlite3.DatabaseError, ValueError, OSError) as error:
            note = note or f"{path.name} cannot be read ({error})"
            continue
        if not own:
            continue
        time_ns = sum(sum(chunk.totals[len(COUNTS) :]) for chunk in chunks)
        count = sum(chunk.num_steps for chunk in chunks)
        if not trained:
            steps, meta = own, facts
            step_ns = time_ns / count if count else None
        trained += 1
        rates += sum(chunk.totals[SAMPLES] for chunk in chunks) * NS_PER_S / time_ns if time_ns else 0.0
    return RunRow(
        id=folder.name,
        script=str(manifest.get("script", "")),
        argv=tuple(map(str, manifest.get("argv") or ())),
        started=str(manifest.get("started", "")),
        state=live.state,
        words=words(folder.name, manifest, live, meta),
        num_steps=steps,
        world_size=max(1, trained),
        step_ms=step_ns / NS_PER_MS if step_ns else None,
        samples_per_s=rates or None,
        tuned=tuned,
        note=note,
    )
