"""A run's records to a `Profile`: pure arithmetic over what the store holds."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.analysis.across import stride_for
from diagnose.analysis.compare import StepSeries
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
from diagnose.analysis.loaders import loaders_of
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
from diagnose.analysis.reducers import Reducers, reducers
from diagnose.analysis.reduction import Reduced, read_or_note, reduce_files, reduce_logs
from diagnose.analysis.run_info import notes_of, notes_of_files, overhead_of, run_info
from diagnose.analysis.script import Script
from diagnose.analysis.series import summarize_series
from diagnose.analysis.signals import host_stats, settings_of
from diagnose.analysis.spans import part_of
from diagnose.analysis.standing import with_waits
from diagnose.analysis.steps import GapParts, divided, phase_series, step_times, warmup_of
from diagnose.analysis.stopped import stopped_steps
from diagnose.analysis.throughput import rate, throughput_of
from diagnose.analysis.transforms import with_transforms
from diagnose.analysis.tuning import tuning_of
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile, Status, StepStats
from diagnose.core.trial import Tuning
from diagnose.core.units import NS_PER_S
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog
from diagnose.store.runs import earlier_files, number_of, rank_files, read_lost, read_manifest

MIN_STEPS = 20
"""Fewer measured steps than this give figures, but no verdict."""

FEW_RANKS = 8
FEW_BYTES = 32 << 20
"""A run of no more ranks, or no larger, is read by this process alone: others take half a second to start,
and it reads this much in less."""


def load_profile(run: Path, *, first_step: int | None = None, alone: bool = False) -> Profile:
    """Reads and analyses a run, finished or not.

    Args:
        run: The run's folder.
        first_step: Leave out every step before this one. Default: look at all of them, or, of a run that
            was tuned, at those before anything was changed.
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
            return _without_steps(manifest, [*notes, *_lost(manifest)]), {}
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
        return _without_steps(manifest, notes)
    by_rank: dict[int, RankLog] = {}
    for log in logs:
        by_rank.setdefault(int(log.meta.get("rank", 0)), log)
    own = list(by_rank.values())
    notes = [*notes, *notes_of_files(len(logs), len(own), ())]
    script = Script()
    window = window_of(manifest, own[0], first_step, len(own))
    return composed(manifest, own[0], window, reduce_logs(enumerate(own), window, script), script, notes)


def window_of(manifest: Mapping[str, Any], log: RankLog, first_step: int | None, num_ranks: int) -> Window:
    """Returns the steps to look at on all ranks, as the first rank's records tell; `first_step` as in
    `load_profile`."""
    part: tuple[int, int | None] | None = None
    if first_step is not None:
        part = (first_step, None)
    else:
        tuning = tuning_of(log)
        if tuning is not None and tuning.untouched[1] > MIN_STEPS:
            part = tuning.untouched
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
    return (
        replace(series, samples=series.samples.astype(np.float64) * (whole / own))
        if whole and own
        else series
    )


def first_log(run: Path, rank: int | None = None) -> RankLog | None:
    """Reads the first rank's file, or the first of another rank; `None` if it recorded no steps."""
    logs = (read_or_note(path)[0] for path in rank_files(run))
    wanted = (log for log in logs if log is not None and len(log.steps))
    return next((log for log in wanted if rank is None or log.meta.get("rank") == rank), None)


def _without_steps(manifest: Mapping[str, Any], notes: Iterable[str]) -> Profile:
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
