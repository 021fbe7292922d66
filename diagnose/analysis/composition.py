"""Puts a run's records and the summaries of its ranks together into a `Profile`: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from diagnose.analysis.across import stride_for
from diagnose.analysis.copies import copies_of
from diagnose.analysis.deep_window import (
    Spoilt,
    deep_window_of,
    device_readings,
    spoilt_steps,
    untold_window,
)
from diagnose.analysis.device import device_of
from diagnose.analysis.device_ledger import device_share, idle_at_most, idle_ns
from diagnose.analysis.history import history_of
from diagnose.analysis.late_bins import bin_width
from diagnose.analysis.lines import source_lines, worker_lines
from diagnose.analysis.loaders import evaluating_of, loaders_of
from diagnose.analysis.loading import input_stats
from diagnose.analysis.now_and_then import now_and_then
from diagnose.analysis.opening import with_reading
from diagnose.analysis.own_loading import with_own_loading
from diagnose.analysis.program import program_of
from diagnose.analysis.rank_summary import Window, of_first_group
from diagnose.analysis.reduction import Reduced
from diagnose.analysis.run_info import notes_of, overhead_of, run_info
from diagnose.analysis.script import Script
from diagnose.analysis.series import summarize_series
from diagnose.analysis.side_by_side import SideBySide
from diagnose.analysis.signals import host_stats, settings_of
from diagnose.analysis.spans import part_of
from diagnose.analysis.standing import with_waits
from diagnose.analysis.steps import divided, phase_series, step_times, warmup_of
from diagnose.analysis.stopped import stopped_steps
from diagnose.analysis.throughput import rate, throughput_of
from diagnose.analysis.transforms import with_transforms
from diagnose.analysis.tuning import tuning_of
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RunInfo, Status, StepStats
from diagnose.core.trial import Tuning
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog

MIN_STEPS = 20
"""Fewer measured steps than this give figures, but no verdict."""


def window_of(manifest: Mapping[str, Any], log: RankLog, first_step: int | None, num_ranks: int) -> Window:
    """Returns the steps to look at on all ranks, as the first rank's records tell; `first_step` as in
    `load_profile`."""
    part: tuple[int, int | None] | None = None
    if first_step is not None:
        part = (first_step, None)
    else:
        tuning = tuning_of(log)
        if tuning is not None and tuning.as_it_is[1] - tuning.as_it_is[0] > MIN_STEPS:
            part = tuning.as_it_is
    spoilt = _spoilt(log)
    looked_at = Window(part=part, spoilt=spoilt).of(log)
    warmup = warmup_of(manifest, looked_at)
    return Window(
        part=part,
        spoilt=spoilt,
        warmup=warmup,
        stride=stride_for(len(looked_at.steps), num_ranks),
        bin_width=bin_width(len(looked_at.steps) - warmup),
    )


def _spoilt(log: RankLog) -> Spoilt:
    """Returns the steps that are in no figure."""
    return (*spoilt_steps(log), *stopped_steps(log))


def composed(
    manifest: Mapping[str, Any],
    whole: RankLog,
    window: Window,
    reduced: Reduced,
    script: Script,
    notes: Iterable[str],
    *,
    only_first: bool = False,
) -> Profile:
    """Puts the first rank's records and the summaries of all ranks together.

    Args:
        manifest: What `run.json` says.
        whole: The first rank's records.
        window: The steps that are looked at.
        reduced: All ranks, the first included.
        script: What its source says.
        notes: What could not be read.
        only_first: Whether the other ranks were not looked at.
    """
    main, warmup = window.of(whole), window.warmup
    rows = main.steps[warmup:]
    sources = script.sources
    program = program_of(main, warmup, sources)
    side_by_side = SideBySide(reduced, program)
    ranks = side_by_side.ranks
    first = ranks[0]
    info = run_info(manifest, whole, ranks)
    if only_first:
        info = replace(info, world_size=int(whole.meta.get("world_size") or 1))
    stats = _step_stats(whole, main, warmup)
    fed = () if only_first else of_first_group(ranks)
    samples_per_s = sum(rank.samples_per_s for rank in fed)
    own = rate(rows, "samples")
    deep = deep_window_of(whole)
    if deep is not None:
        deep = replace(deep, usual_step_ns=sum(first.phase_time_ns.values()))
    dry = idle_at_most(main, warmup)
    host = host_stats(main, warmup)
    times = divided(rows, first.gap_parts)
    loading = with_own_loading(input_stats(main, warmup, times[Phase.DATA_WAIT]), main, warmup, sources)
    lines = source_lines(main, rows, warmup, script.roles(main), script.places)
    return Profile(
        run=info,
        status=_status(info, stats),
        throughput=throughput_of(rows, samples_per_s, sum(rank.tokens_per_s for rank in fed)),
        steps=stats,
        phase_time_ns=first.phase_time_ns,
        where=(*with_waits(lines, main, host), *worker_lines(main, sources)),
        input=with_transforms(with_reading(loading, main, sources), main, sources),
        overhead=overhead_of(whole, manifest),
        ranks=side_by_side.profiles(),
        history=history_of(whole, first.gap_parts, side_by_side.late_ranks(window)),
        series=replace(
            summarize_series(times, rows[:, COUNTS.index("tokens")].astype(float)),
            now_and_then=now_and_then(main.meta.get("facts", {}), rows, times),
        ),
        host=host,
        program=replace(
            side_by_side.program(sources),
            loaders=loaders_of(main, sources),
            evaluating=evaluating_of(main, warmup, sources),
        ),
        settings=settings_of(main),
        device=replace(
            device_of(main, warmup, {"idle_ns": idle_ns(main, warmup), **device_readings(deep)}),
            idle_at_most_ns=None
            if dry is None
            else {phase: float(ns.mean()) for phase, ns in divided(dry, first.gap_parts).items()},
        ),
        deep_window=deep,
        device_clock_share=device_share(main, warmup),
        copies=copies_of(main, warmup),
        events=side_by_side.events(),
        tuning=_tuning(whole, samples_per_s / own if own else 0.0),
        ranks_comparable=None if side_by_side.untold else True,
        notes=tuple(
            dict.fromkeys(
                [
                    *notes,
                    *notes_of(manifest, ranks, only_first=only_first),
                    *_untold(side_by_side),
                    *untold_window(whole, is_over=bool(manifest.get("ended_unix"))),
                ]
            )
        ),
    )


def _status(info: RunInfo, stats: StepStats) -> Status:
    if info.error is not None or info.signal is not None or info.exit_code not in (0, None):
        return Status.SCRIPT_FAILED
    return Status.OK if stats.measured >= MIN_STEPS else Status.TOO_FEW_STEPS


def _untold(side_by_side: SideBySide) -> list[str]:
    untold = side_by_side.untold
    return [f"Which rank is late is not told: {untold}."] if untold else []


def without_steps(manifest: Mapping[str, Any], notes: Iterable[str]) -> Profile:
    notes = dict.fromkeys([*notes, *notes_of(manifest, [])])
    return Profile(run=run_info(manifest, None, []), status=Status.NO_STEPS, notes=tuple(notes))


def _step_stats(whole: RankLog, main: RankLog, warmup: int) -> StepStats:
    times = step_times(main.steps)[warmup:]
    passes = main.steps[warmup:, COLUMNS.index("backward_passes")]
    return StepStats(
        count=len(whole.steps),
        warmup=warmup,
        left_out=len(whole.steps) - len(main.steps),
        total_time_ns=int(times.sum()),
        mean_ns=float(times.mean()) if len(times) else None,
        median_ns=float(np.median(times)) if len(times) else None,
        p95_ns=float(np.percentile(times, 95)) if len(times) else None,
        p99_ns=float(np.percentile(times, 99)) if len(times) else None,
        passes=max(1.0, float(np.median(passes))) if len(times) else 1.0,
    )


def _tuning(log: RankLog, ranks: float) -> Tuning | None:
    """Returns what tuning did; `ranks`: how many times the samples of the first rank all of them have."""
    tuning = tuning_of(log)
    if tuning is None or tuning.tuned is None:
        return tuning
    part = part_of(log, *tuning.tuned)
    if not len(part.steps):
        return tuning
    series = phase_series(part, part.steps, 0, Roles(part.sites, Sources(part.sources), part.samples))
    return replace(
        tuning,
        tuned_phase_time_ns={phase: float(times.mean()) for phase, times in series.items()},
        tuned_median_ns=float(np.median(step_times(part.steps))),
        tuned_samples_per_s=ranks * rate(part.steps, "samples") or None,
    )
