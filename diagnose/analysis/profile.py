"""A run's records to a `Profile`: pure arithmetic over what the store holds."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.compare import StepSeries
from diagnose.analysis.gaps import split_gaps
from diagnose.analysis.history import history_of
from diagnose.analysis.imbalance import common_ns, imbalance_of, late_shares
from diagnose.analysis.lines import source_lines, standing_ns, worker_lines
from diagnose.analysis.loading import input_stats, loaders_of
from diagnose.analysis.program import program_of
from diagnose.analysis.roles import Roles, Sources
from diagnose.analysis.series import summarize_series
from diagnose.analysis.signals import host_stats, settings_of
from diagnose.analysis.spans import part_of
from diagnose.analysis.throughput import interval_95
from diagnose.analysis.tuning import KINDS, tuning_of
from diagnose.core.ledger import COLUMNS, COUNTS, FIRST_GAP, HOOKED
from diagnose.core.phases import Phase
from diagnose.core.profile import (
    Overhead,
    Profile,
    RankProfile,
    RunInfo,
    Status,
    StepStats,
    Throughput,
)
from diagnose.core.trial import Tuning
from diagnose.core.units import NS_PER_S
from diagnose.store.reader import RankLog, read_rank
from diagnose.store.runs import LOST, rank_files, read_manifest

MIN_STEPS = 20
"""Fewer measured steps than this give figures, but no verdict."""

WARMUP_CUTS = (1, 2, 3, 5, 8, 12, 16, 20)
"""Where the sampled lines can be cut off, too (`hooks._recorder.ROTATE_AT`)."""

WARMUP_SLOW = 2.0
"""A leading step that took this many times the median of the others belongs to the warm-up."""

MAX_WARMUP_SHARE = 0.25

Vector = npt.NDArray[np.float64]


def load_profile(run: Path, *, first_step: int | None = None) -> Profile:
    """Reads and analyses a run, finished or not.

    Args:
        run: The run's folder.
        first_step: Leave out every step before this one. Default: look at all of them, or, of a run that
            was tuned, at those before anything was changed.

    Raises:
        DiagnoseError: If it was written by a newer version.
    """
    return profile_of(*read_run(run), first_step=first_step)


def read_run(run: Path) -> tuple[dict[str, Any], list[RankLog], list[str]]:
    """Reads what `profile_of` analyses: what `run.json` says, the files of all ranks, and notes."""
    manifest = read_manifest(run)
    with contextlib.suppress(OSError):
        manifest.setdefault("torch", (run / "torch").read_text(encoding="utf-8"))
    logs, notes = read_logs(run)
    with contextlib.suppress(OSError):
        notes.append((run / LOST).read_text(encoding="utf-8"))
    return manifest, logs, notes


def read_logs(run: Path) -> tuple[list[RankLog], list[str]]:
    """Reads the files of all ranks; what cannot be read is named in the notes."""
    logs: list[RankLog] = []
    notes: list[str] = []
    for path in rank_files(run):
        try:
            log = read_rank(path)
        except sqlite3.DatabaseError as error:
            notes.append(f"{path.name} cannot be read ({error}); its steps are missing.")
            continue
        logs.append(log)
        notes += log.notes
    return [log for log in logs if len(log.steps)], notes


def profile_of(
    manifest: Mapping[str, Any],
    logs: list[RankLog],
    notes: Iterable[str] = (),
    *,
    first_step: int | None = None,
) -> Profile:
    """Analyses what `read_logs` returned; `first_step` as in `load_profile`."""
    notes = list(notes)
    for log in logs:
        notes += [
            f"rank {_rank(log)}: {note}" if len(logs) > 1 else note for note in log.meta.get("notes", ())
        ]
        if not log.meta.get("finished", False) and manifest.get("ended_unix"):
            notes.append(
                f"{log.path.name} was not closed (killed, or a full disk?); its last records are missing."
            )
        if log.meta.get("journal") == "delete":
            notes.append(
                f"{log.path.name}: this file system has no write-ahead log; it was written without one."
            )
    notes += [str(note) for note in manifest.get("notes", ())]
    if len({_rank(log) for log in logs}) < len(logs):
        notes.append(f"{len(logs)} processes of the script trained; the figures are those of the first.")
    info = _run_info(manifest, logs)
    if not logs:
        return Profile(run=info, status=Status.NO_STEPS, notes=tuple(dict.fromkeys(notes)))

    tuning = tuning_of(logs[0])
    num_steps = len(logs[0].steps)
    overhead = _overhead(logs[0], manifest)
    whole = logs[0]
    if first_step is not None:
        logs = [part_of(log, first_step) for log in logs]
    elif tuning is not None:
        tuning = replace(tuning, tuned_phase_time_ns=_tuned_phases(logs[0], tuning))
        if tuning.untouched[1] > MIN_STEPS:
            logs = [part_of(log, *tuning.untouched) for log in logs]
    main = logs[0]
    warmup = _warmup(manifest, main)
    sources = Sources()
    measured = [log.steps[min(warmup, len(log.steps)) :] for log in logs]
    rank_series = [
        phase_series(log, rows, warmup, Roles(log.sites, sources, log.samples))
        for log, rows in zip(logs, measured, strict=True)
    ]
    rank_phases = [
        {phase: float(times.mean()) if len(times) else 0.0 for phase, times in series.items()}
        for series in rank_series
    ]
    rows = measured[0]
    times = step_times(main.steps)[warmup:]
    roles = Roles(main.sites, sources, main.samples)
    where = source_lines(main, rows, warmup, roles, sources)
    stats = StepStats(
        count=num_steps,
        warmup=warmup,
        left_out=num_steps - len(main.steps),
        total_time_ns=int(times.sum()),
        mean_ns=float(times.mean()) if len(times) else None,
        median_ns=float(np.median(times)) if len(times) else None,
        p95_ns=float(np.percentile(times, 95)) if len(times) else None,
        p99_ns=float(np.percentile(times, 99)) if len(times) else None,
    )
    numbers = {_rank(log) for log in logs}
    failed = info.error is not None or info.signal is not None or info.exit_code not in (0, None)
    status = Status.SCRIPT_FAILED if failed else Status.OK
    if status is Status.OK and stats.measured < MIN_STEPS:
        status = Status.TOO_FEW_STEPS
    return Profile(
        run=info,
        status=status,
        throughput=_throughput(measured),
        steps=stats,
        phase_time_ns=rank_phases[0],
        where=(*where, *worker_lines(main, sources)),
        input=input_stats(main, warmup),
        overhead=overhead,
        ranks=tuple(
            RankProfile(
                rank=index if len(numbers) < len(logs) else _rank(log),
                host=str(log.meta.get("host", "")),
                phase_time_ns=phases,
                standing_ns=_standing_ns(log, warmup, sources) if len(logs) > 1 else 0.0,
                late_share=late,
            )
            for index, (log, phases, late) in enumerate(
                zip(logs, rank_phases, late_shares(rank_series), strict=True)
            )
        ),
        history=history_of(whole, split_gaps(main, warmup, roles)),
        series=summarize_series(rank_series[0]),
        host=host_stats(main, warmup),
        program=replace(
            program_of(logs, warmup),
            loaders=loaders_of(main, sources),
            imbalance=imbalance_of(logs, warmup),
            collective_ns=common_ns(rank_series, Phase.COMMUNICATION),
        ),
        settings=settings_of(main),
        events=dict(Counter(kind for log in logs for _, _, kind, _ in log.events if kind not in KINDS)),
        tuning=tuning,
        notes=tuple(dict.fromkeys(notes)),
    )


def _standing_ns(log: RankLog, warmup: int, sources: Sources) -> float:
    rows = log.steps[min(warmup, len(log.steps)) :]
    return standing_ns(log, rows, warmup, Roles(log.sites, sources, log.samples), sources)


def _tuned_phases(log: RankLog, tuning: Tuning) -> dict[Phase, float]:
    if tuning.tuned is None:
        return {}
    part = part_of(log, *tuning.tuned)
    series = phase_series(part, part.steps, 0, Roles(part.sites, Sources(), part.samples))
    return {phase: float(times.mean()) for phase, times in series.items()} if len(part.steps) else {}


def step_times(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the wall time of each step in nanoseconds: the sum of its slots, shape `(steps,)`."""
    times: npt.NDArray[np.int64] = steps[:, len(COUNTS) :].sum(axis=1)
    return times


def find_warmup(steps: npt.NDArray[np.int64]) -> int:
    """Returns how many leading steps to leave out.

    The first always (it creates optimizer state and fills caches), then all up to the last leading one that
    was much slower than the rest or compiled, but never more than a quarter of the run.

    Args:
        steps: int64 of shape `(steps, len(COLUMNS))`.
    """
    times = step_times(steps)
    if len(times) < 2:
        return 0
    usual = float(np.median(times[len(times) // 2 :]))
    compiled = steps[:, COLUMNS.index(Phase.COMPILE.value)] > 0
    most = max(1, int(len(times) * MAX_WARMUP_SHARE))
    best = 1
    for cut in WARMUP_CUTS:
        if cut > most:
            break
        slow = times[best:cut] > WARMUP_SLOW * usual
        if slow.any() or compiled[best:cut].any():
            best = cut
    return best


def load_series(run: Path) -> StepSeries:
    """Reads the measured steps of a run's first rank one by one, for a comparison with another run's."""
    logs, _ = read_logs(run)
    if not logs:
        empty = np.zeros(0)
        return StepSeries(step_time_ns=empty, phase_time_ns={}, samples=empty)
    log = logs[0]
    warmup = _warmup(read_manifest(run), log)
    rows = log.steps[warmup:]
    return StepSeries(
        step_time_ns=step_times(rows).astype(float),
        phase_time_ns=phase_series(log, rows, warmup, Roles(log.sites, Sources(), log.samples)),
        samples=rows[:, COLUMNS.index("samples")].astype(float),
    )


def phase_series(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles
) -> dict[Phase, Vector]:
    """Returns nanoseconds of each phase in each step; over the phases they sum to the step.

    A hooked phase is exact in each step. A gap is exact too, but it is divided in every step as the lines
    sampled in all of them divide it on average.

    Args:
        log: One rank's records.
        rows: Its measured steps.
        warmup: Leading steps whose samples are left out.
        roles: Tells what a line between hooks serves.
    """
    slots = rows[:, len(COUNTS) :].astype(float)
    phases: dict[Phase, Vector] = {phase: slots[:, slot] for slot, phase in enumerate(HOOKED)}
    phases[Phase.OTHER] = np.zeros(len(rows))
    parts = split_gaps(log, warmup, roles)
    for slot in range(FIRST_GAP, slots.shape[1]):
        for phase, part in parts.get(slot, {Phase.OTHER: 1.0}).items():
            phases[phase] = phases[phase] + part * slots[:, slot]
    return phases


def _warmup(manifest: Mapping[str, Any], log: RankLog) -> int:
    asked = manifest.get("warmup")
    return find_warmup(log.steps) if asked is None else min(int(asked), len(log.steps))


def _throughput(measured: list[npt.NDArray[np.int64]]) -> Throughput:
    """All ranks together: the sum of each rank's rate."""
    per_rank = [rows for rows in measured if len(rows)]
    if not per_rank:
        return Throughput()
    samples = sum(_rate(rows, "samples") for rows in per_rank)
    tokens = sum(_rate(rows, "tokens") for rows in per_rank)
    times = step_times(per_rank[0])
    interval = None
    if samples:
        low, high = interval_95(per_rank[0][:, COLUMNS.index("samples")], times)
        own = _rate(per_rank[0], "samples")
        interval = (samples * low / own, samples * high / own) if own and isfinite(high) else None
    return Throughput(
        samples_per_s=samples or None,
        samples_per_s_ci95=interval,
        tokens_per_s=tokens or None,
        steps_per_s=len(times) * NS_PER_S / float(times.sum()),
    )


def _rate(rows: npt.NDArray[np.int64], column: str) -> float:
    total_ns = float(step_times(rows).sum())
    return float(rows[:, COLUMNS.index(column)].sum()) * NS_PER_S / total_ns if total_ns else 0.0


def _overhead(log: RankLog, manifest: Mapping[str, Any]) -> Overhead:
    meta = log.meta
    steps = len(log.steps)
    spans = float(log.steps[:, COLUMNS.index("spans")].sum())
    spent_ns = (
        spans * float(meta.get("span_ns", 0))
        + float(meta.get("sampler_ns", 0))
        + float(meta.get("flusher_ns", 0))
    )
    startup = float(meta.get("startup_ns", 0)) / NS_PER_S + float(manifest.get("startup_s") or 0)
    return Overhead(us_per_step=spent_ns / steps / 1000 if steps else None, startup_s=startup)


def _run_info(manifest: Mapping[str, Any], logs: list[RankLog]) -> RunInfo:
    meta = logs[0].meta if logs else {}
    started, ended = manifest.get("started_unix"), manifest.get("ended_unix")
    errors = [log.meta["error"] for log in logs if log.meta.get("error")]
    return RunInfo(
        id=str(manifest.get("id", "")),
        script=str(manifest.get("script", "")),
        argv=tuple(map(str, manifest.get("argv", ()))),
        exit_code=manifest.get("exit_code"),
        signal=manifest.get("signal"),
        world_size=max(len(logs), 1),
        device=str(meta.get("device", "cpu")),
        torch=meta.get("torch") or manifest.get("torch"),
        started=str(manifest.get("started", "")),
        duration_s=ended - started if started and ended else None,
        error=errors[0] if errors else None,
    )


def _rank(log: RankLog) -> int:
    return int(log.meta.get("rank", 0))
