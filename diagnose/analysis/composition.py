"""Puts a run's records and the summaries of its ranks together into a `Profile`: pure arithmetic."""

from __future__ import annotations

from collections import Counter
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
from diagnose.analysis.device_ledger import device_share, idle_ns
from diagnose.analysis.history import history_of
from diagnose.analysis.imbalance import imbalance_of
from diagnose.analysis.late_bins import bin_width, late_ranks
from diagnose.analysis.lateness import lateness
from diagnose.analysis.lines import source_lines, worker_lines
from diagnose.analysis.loaders import evaluating_of, loaders_of
from diagnose.analysis.loading import input_stats
from diagnose.analysis.opening import with_reading
from diagnose.analysis.own_loading import with_own_loading
from diagnose.analysis.program import program_of, with_call
from diagnose.analysis.rank_clocks import clock_offset
from diagnose.analysis.rank_summary import (
    Window,
    meet_in_all,
    of_first_group,
    why_incomparable,
    with_idleness,
)
from diagnose.analysis.reduction import Reduced
from diagnose.analysis.run_info import notes_of, overhead_of, run_info
from diagnose.analysis.script import Script
from diagnose.analysis.series import summarize_series
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
from diagnose.core.profile import Profile, RankProfile, Status, StepStats
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
    across = reduced.across
    assert across is not None, "the first rank is one of them"
    places = sorted(reduced.ranks)
    ranks = [reduced.ranks[place] for place in places]
    numbered = {place: reduced.ranks[place].rank for place in places}
    info = run_info(manifest, whole, ranks)
    if only_first:
        info = replace(info, world_size=int(whole.meta.get("world_size") or 1))
    main = window.of(whole)
    warmup = window.warmup
    rows = main.steps[warmup:]
    sources, roles = script.sources, script.roles(main)
    parts = ranks[0].gap_parts
    stats = _step_stats(whole, main, warmup)
    failed = info.error is not None or info.signal is not None or info.exit_code not in (0, None)
    status = Status.SCRIPT_FAILED if failed else Status.OK
    if status is Status.OK and stats.measured < MIN_STEPS:
        status = Status.TOO_FEW_STEPS
    exchanges = any(rank.exchanged_ns for rank in ranks)
    meetings = across.waits.meetings(numbered)
    program = program_of(main, warmup, sources)
    in_all = meet_in_all(ranks, program, by_meetings=meetings is not None)
    gatherings = across.meets.meetings(numbered) if in_all else None
    met = across.waits if meetings is not None else across.meets if gatherings is not None else None
    names = [rank.rank for rank in ranks]
    untold = why_incomparable(ranks, by_meetings=meetings is not None)
    late_ns: list[float | None] = [None] * len(ranks)
    if not untold:
        late_ns = lateness([rank.phase_time_ns for rank in ranks], meetings or gatherings)
    fed = () if only_first else of_first_group(ranks)
    samples_per_s = sum(rank.samples_per_s for rank in fed)
    own = rate(rows, "samples")
    deep = deep_window_of(whole)
    if deep is not None:
        deep = replace(deep, usual_step_ns=sum(ranks[0].phase_time_ns.values()))
    host = host_stats(main, warmup)
    loading = input_stats(main, warmup, divided(rows, parts)[Phase.DATA_WAIT])
    loading = with_own_loading(loading, main, warmup, sources)
    device = device_of(main, warmup, {"idle_ns": idle_ns(main, warmup), **device_readings(deep)})
    return Profile(
        run=info,
        status=status,
        throughput=throughput_of(rows, samples_per_s, sum(rank.tokens_per_s for rank in fed)),
        steps=stats,
        phase_time_ns=ranks[0].phase_time_ns,
        where=(
            *with_waits(source_lines(main, rows, warmup, roles, script.places), main, host),
            *worker_lines(main, sources),
        ),
        input=with_transforms(with_reading(loading, main, sources), main, sources),
        overhead=overhead_of(whole, manifest),
        ranks=tuple(
            RankProfile(
                rank=names[index],
                host=rank.host,
                phase_time_ns=rank.phase_time_ns,
                standing_ns=rank.standing_ns,
                working_ns=rank.working_ns,
                gathering_ns=rank.gathering_ns,
                exchanged_ns=rank.exchanged_ns,
                averaged_ns=rank.averaged_ns,
                late_ns_per_step=late_ns[index],
                late_share=late,
                stats=rank.stats,
                clock=clock_offset(ranks[0].met_ns, rank.met_ns),
            )
            for index, (rank, late) in enumerate(zip(ranks, across.late_shares(places), strict=True))
        ),
        history=history_of(
            whole,
            parts,
            None
            if untold
            else late_ranks(
                names,
                [rank.waits_ns for rank in ranks],
                met,
                (window.part or (0, None))[0] + warmup,
                window.bin_width,
            ),
        ),
        series=summarize_series(divided(rows, parts), rows[:, COUNTS.index("tokens")].astype(float)),
        host=host,
        program=replace(
            program,
            ddp=with_call(
                sources,
                (
                    replace(rank.ddp, rank=name)
                    for name, rank in sorted(zip(names, ranks, strict=True), key=lambda pair: pair[0])
                    if rank.ddp is not None
                ),
            ),
            loaders=loaders_of(main, sources),
            evaluating=evaluating_of(main, warmup, sources),
            pipeline=with_idleness(program.pipeline, ranks),
            imbalance=imbalance_of(across, numbered),
            meetings=meetings,
            gatherings=gatherings,
            collective_ns=across.collective_ns(exchanges=exchanges),
            collective_share=across.collective_share(exchanges=exchanges),
        ),
        settings=settings_of(main),
        device=device,
        deep_window=deep,
        device_clock_share=device_share(main, warmup),
        copies=copies_of(main, warmup),
        events=dict(sum((Counter(rank.events) for rank in ranks), Counter())),
        tuning=_tuning(whole, samples_per_s / own if own else 0.0),
        ranks_comparable=None if untold else True,
        notes=tuple(
            dict.fromkeys(
                [
                    *notes,
                    *notes_of(manifest, ranks, only_first=only_first),
                    *([f"Which rank is late is not told: {untold}."] if untold else []),
                    *untold_window(whole, is_over=bool(manifest.get("ended_unix"))),
                ]
            )
        ),
    )


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
