"""What a run is, and what its reader must know of it: how it ended, what is lost, which ranks are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnose.analysis.device_ledger import recording_ns
from diagnose.analysis.rank_summary import RankSummary, of_first_group
from diagnose.core.ledger import COLUMNS
from diagnose.core.profile import Overhead, RunInfo
from diagnose.core.units import NS_PER_S
from diagnose.store.reader import RankLog

MAX_ALIKE = 8
"""Ranks that say the same are named one by one up to so many."""


def run_info(manifest: Mapping[str, Any], log: RankLog | None, ranks: Sequence[RankSummary]) -> RunInfo:
    """Returns which program ran, where, and how it ended.

    Args:
        manifest: What `run.json` says; beside it, under `lost`, what the recorder said of lost records.
        log: The first rank's records, if any rank recorded steps.
        ranks: All that did.
    """
    meta = log.meta if log is not None else {}
    started, ended = manifest.get("started_unix"), manifest.get("ended_unix")
    return RunInfo(
        id=str(manifest.get("id", "")),
        script=str(manifest.get("script", "")),
        argv=tuple(map(str, manifest.get("argv", ()))),
        exit_code=manifest.get("exit_code"),
        signal=manifest.get("signal"),
        world_size=max(len(ranks), 1),
        device=str(meta.get("device", "cpu")),
        torch=meta.get("torch") or manifest.get("torch"),
        started=str(manifest.get("started", "")),
        duration_s=ended - started if started and ended else None,
        error=next((rank.error for rank in ranks if rank.error), None),
        recorder=meta.get("recorder"),
        lost=why_lost(manifest),
    )


def why_lost(manifest: Mapping[str, Any]) -> str:
    """Returns why records are lost: what the recorder could still write, else that the disk is full."""
    said = str(manifest.get("lost") or "").strip()
    if said:
        return said.splitlines()[0].rstrip(".")
    return "the disk has no room left; records may be lost" if manifest.get("no_room") else ""


def overhead_of(log: RankLog, manifest: Mapping[str, Any]) -> Overhead:
    """Returns what measuring a rank cost, by its own account."""
    meta = log.meta
    steps = len(log.steps)
    spans = float(log.steps[:, COLUMNS.index("spans")].sum())
    spent_ns = (
        spans * float(meta.get("span_ns", 0))
        + float(meta.get("sampler_ns", 0))
        + float(meta.get("flusher_ns", 0))
        + recording_ns(log)
    )
    startup = float(meta.get("startup_ns", 0)) / NS_PER_S + float(manifest.get("startup_s") or 0)
    return Overhead(us_per_step=spent_ns / steps / 1000 if steps else None, startup_s=startup)


def notes_of(
    manifest: Mapping[str, Any], ranks: Sequence[RankSummary], *, only_first: bool = False
) -> list[str]:
    """Returns what the ranks said of their own measurement, and what is to be said of them; of the first
    alone not that the others are missing."""
    said: dict[str, list[str]] = {}
    unclosed: list[str] = []
    without_log: list[str] = []
    for rank in ranks:
        for note in rank.notes:
            said.setdefault(note, []).append(f"rank {rank.rank}")
        if not rank.finished and manifest.get("ended_unix"):
            unclosed.append(rank.file)
        if rank.journal == "delete":
            without_log.append(rank.file)
    notes = [
        f"{who}: {note}" if len(ranks) > 1 else note
        for note, whose in said.items()
        for who, _ in _named(whose)
    ]
    notes += [
        f"{who} {'was' if one else 'were'} not closed (killed, or a full disk?); "
        f"{'its' if one else 'their'} last records are missing."
        for who, one in _named(unclosed)
    ]
    notes += [
        f"{who}: this file system has no write-ahead log; it was written without one."
        for who, _ in _named(without_log)
    ]
    notes += [str(note) for note in manifest.get("notes", ())]
    if ranks and not only_first and len(of_first_group(ranks)) < len(ranks):
        notes.append(
            f"Rates are of the {len(of_first_group(ranks))} ranks that average gradients with the first: "
            "other groups of ranks may be given the same batches."
        )
    numbers = {rank.rank for rank in ranks}
    world_size = max((rank.world_size or 1 for rank in ranks), default=1)
    if ranks and len(numbers) < world_size and not only_first:
        chosen = manifest.get("ranks", "all")
        why = "their files are not in the run's folder" if chosen == "all" else f"--ranks {chosen}"
        notes.append(
            f"{len(numbers):,} of {world_size:,} ranks are here ({why}): rates are of these together, and "
            "a late rank among the others shows only as waiting."
        )
    return notes


def notes_of_files(num_processes: int, num_ranks: int, earlier: Sequence[Path]) -> list[str]:
    """Returns what is to be said of files that are left out.

    Args:
        num_processes: How many processes have left files in the newest attempt.
        num_ranks: How many of them are looked at: of each rank one.
        earlier: The files of earlier attempts.
    """
    notes = []
    if num_processes > num_ranks:
        trained = f"{num_processes} processes of the script trained"
        notes.append(f"{trained}; the figures are those of the first.")
    if earlier:
        left_out = ", ".join(who for who, _ in _named([path.name for path in earlier]))
        notes.append(f"The ranks were restarted, and what they did before is left out: {left_out}.")
    return notes


def _named(names: list[str]) -> list[tuple[str, bool]]:
    """Names each of a few; of many the first, and how many more there are. With it: whether it is one."""
    if len(names) <= MAX_ALIKE:
        return [(name, True) for name in names]
    return [(f"{names[0]} and {len(names) - 1} others", False)]
