"""Reads a run's folder and analyses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.analysis.compare import StepSeries, compare, differences, tuned_parts
from diagnose.analysis.composition import composed, window_of, without_steps
from diagnose.analysis.recorders import measured_otherwise
from diagnose.analysis.reducers import Reducers, reducers
from diagnose.analysis.reduction import read_or_note, reduce_files, reduce_logs
from diagnose.analysis.run_info import notes_of_files
from diagnose.analysis.script import Script
from diagnose.analysis.steps import GapParts, phase_series, step_times
from diagnose.core.comparison import Comparison
from diagnose.core.ledger import COLUMNS
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_S
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog
from diagnose.store.runs import earlier_files, number_of, rank_files, read_lost, read_manifest

FEW_RANKS = 8
FEW_BYTES = 32 << 20
"""A run of no more ranks, or no larger, is read by this process alone: others take half a second to start,
and it reads this much in less."""


def load_profile(run: Path, *, first_step: int | None = None, alone: bool = False) -> Profile:
    """Reads and analyses a run, finished or not.

    Args:
        run: The run's folder.
        first_step: Leave out every step before this one. Default: look at all of them, or, of a run that
            was tuned, at those before anything was changed, or after all trials if none kept anything.
        alone: Start no processes to read with: a job that trains meanwhile needs the CPUs.

    Raises:
        DiagnoseError: If it was written by a newer version.
    """
    return analysed(run, first_step=first_step, alone=alone)[0]


def analysed(
    run: Path, *, first_step: int | None = None, alone: bool = False, only_first: bool = False
) -> tuple[Profile, dict[str, GapParts]]:
    """Reads and analyses a run as `load_profile` does, and tells how the gaps of each file's rank divide.

    Of all ranks but the first no more than summaries is kept. Those of a large job are made in several
    processes at once.

    Args:
        run: As in `load_profile`, as are the next two.
        first_step: See there.
        alone: See there.
        only_first: Look at the first rank alone. What only all of them tell, such as rates and who is late,
            is then not measured.
    """
    manifest, notes = _manifest(run), []
    files = list(enumerate(rank_files(run)))
    script = Script()
    with nullcontext() if alone else _reducers(files) as pool:
        first: RankLog | None = None
        while files and first is None:
            place, path = files.pop(0)
            log, damage = read_or_note(path)
            notes += damage
            first = log if log is not None and len(log.steps) else None
        if first is None:
            return without_steps(manifest, [*notes, *_lost(manifest)]), {}
        num_processes, files = len(files) + 1, [] if only_first else _of_other_ranks(files, first)
        if not only_first:
            notes += notes_of_files(num_processes, len(files) + 1, earlier_files(run))
        window = window_of(manifest, first, first_step, len(files) + 1)
        reduced = reduce_logs([(place, first)], window, script)
        reduced.fold(pool.reduce(files, window) if pool else reduce_files(files, window, script))
    notes += [note for place in sorted(reduced.damage) for note in reduced.damage[place]]
    notes += _lost(manifest)
    profile = composed(manifest, first, window, reduced, script, notes, only_first=only_first)
    return profile, {rank.file: rank.gap_parts for rank in reduced.ranks.values()}


def _of_other_ranks(files: list[tuple[int, Path]], first: RankLog) -> list[tuple[int, Path]]:
    """Returns one file of each rank but the first: several processes of a rank are no ranks of one job."""
    by_rank: dict[int, tuple[int, Path]] = {}
    for place, path in files:
        by_rank.setdefault(number_of(path), (place, path))
    by_rank.pop(number_of(first.path), None)
    return list(by_rank.values())


def _reducers(files: list[tuple[int, Path]]) -> AbstractContextManager[Reducers | None]:
    """Starts processes to read with, if there is enough to read for their start to pay."""
    if len(files) <= FEW_RANKS:
        return nullcontext()
    num_bytes = 0
    for _, path in files:
        with contextlib.suppress(OSError):
            num_bytes += path.stat().st_size
    return reducers(len(files)) if num_bytes > FEW_BYTES else nullcontext()


def read_logs(run: Path) -> tuple[list[RankLog], list[str]]:
    """Reads the files of all ranks; what cannot be read is named in the notes."""
    logs: list[RankLog] = []
    notes = notes_of_files(0, 0, earlier_files(run))
    for path in rank_files(run):
        log, damage = read_or_note(path)
        notes += damage
        if log is not None and len(log.steps):
            logs.append(log)
    return logs, notes


def _manifest(run: Path) -> dict[str, Any]:
    manifest = read_manifest(run)
    with contextlib.suppress(OSError):
        manifest.setdefault("torch", (run / "torch").read_text(encoding="utf-8"))
    return {**manifest, "lost": read_lost(run)}


def _lost(manifest: Mapping[str, Any]) -> list[str]:
    return [str(manifest["lost"])] if manifest.get("lost") else []


def profile_of(
    manifest: Mapping[str, Any],
    logs: list[RankLog],
    notes: Iterable[str] = (),
    *,
    first_step: int | None = None,
) -> Profile:
    """Analyses what `read_logs` returned; `first_step` as in `load_profile`."""
    if not logs:
        return without_steps(manifest, notes)
    by_rank: dict[int, RankLog] = {}
    for log in logs:
        by_rank.setdefault(int(log.meta.get("rank", 0)), log)
    own = list(by_rank.values())
    notes = [*notes, *notes_of_files(len(logs), len(own), ())]
    script = Script()
    window = window_of(manifest, own[0], first_step, len(own))
    return composed(manifest, own[0], window, reduce_logs(enumerate(own), window, script), script, notes)


def load_series(run: Path, rank: int | None = None) -> StepSeries:
    """Reads the measured steps of a run's first rank, or of another, one by one, for a comparison with
    another run's."""
    log = first_log(run, rank)
    if log is None:
        empty = np.zeros(0)
        return StepSeries(step_time_ns=empty, phase_time_ns={}, samples=empty)
    window = window_of(read_manifest(run), log, None, 1)  # the steps that `load_profile` is of
    log, warmup = window.of(log), window.warmup
    rows = log.steps[warmup:]
    return StepSeries(
        step_time_ns=step_times(rows).astype(float),
        phase_time_ns=phase_series(log, rows, warmup, Roles(log.sites, Sources(log.sources), log.samples)),
        samples=rows[:, COLUMNS.index("samples")].astype(float),
    )


def load_job_series(run: Path, profile: Profile) -> StepSeries:
    """Reads the steps of a run's first rank as `load_series` does, with the samples that all ranks made
    meanwhile.

    Args:
        run: The run's folder.
        profile: What `load_profile` returned of it.
    """
    series = load_series(run)
    whole = profile.throughput.samples_per_s
    own = NS_PER_S * float(series.samples.sum()) / max(1.0, float(series.step_time_ns.sum()))
    if not whole or not own:
        return series
    return replace(series, samples=series.samples.astype(np.float64) * (whole / own))


def compared(runs: tuple[Path, Path], profiles: tuple[Profile, Profile]) -> Comparison:
    """Compares two runs.

    Args:
        runs: Their folders, the one first that changes are relative to.
        profiles: What `load_profile` returned of each.
    """
    series = (load_job_series(run, profile) for run, profile in zip(runs, profiles, strict=True))
    notes = (*differences(profiles[0].run, profiles[1].run), *tuned_parts(*profiles))
    return compare(*series, notes=notes, otherwise=measured_otherwise(*profiles))


def first_log(run: Path, rank: int | None = None) -> RankLog | None:
    """Reads the first rank's file, or the first of another rank; `None` if it recorded no steps."""
    logs = (read_or_note(path)[0] for path in rank_files(run))
    wanted = (log for log in logs if log is not None and len(log.steps))
    return next((log for log in wanted if rank is None or log.meta.get("rank") == rank), None)
