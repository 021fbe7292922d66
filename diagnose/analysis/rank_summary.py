"""A rank in a few figures: all that a profile needs of a rank that is not the first.

Ranks are summarized one after the other, or in several processes at once, and their records let go: a job
of a thousand ranks fits into memory as a thousand summaries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diagnose.analysis.across import Across
from diagnose.analysis.deep_window import Spoilt, without_steps
from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.gaps import split_gaps
from diagnose.analysis.late_bins import waits_in_bins
from diagnose.analysis.meetings import waits_of
from diagnose.analysis.program import among_all_ns, averaged_ns, ddp_of, exchanged_ns
from diagnose.analysis.rank_clocks import kept
from diagnose.analysis.script import Script
from diagnose.analysis.signals import host_stats
from diagnose.analysis.spans import part_of, rank_of
from diagnose.analysis.steps import GapParts, divided
from diagnose.analysis.throughput import rate
from diagnose.analysis.time_in_lines import gathering_ns, standing_ns, working_ns
from diagnose.analysis.tuning import KINDS
from diagnose.core.deep_window import KIND as DEEP
from diagnose.core.host import HostStats
from diagnose.core.parallel import Ddp, Pipeline
from diagnose.core.phases import Phase
from diagnose.core.program import Program
from diagnose.store.reader import RankLog

HOST, LAUNCHES, DEVICE = "host", "launches", "device"
"""Whose clock a rank's steps are by: the host's, which computes; the host's, which launches what a device
computes; the device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which steps of a run are looked at: the same of every rank.

    Attributes:
        part: The first step, and the one after the last (`None`: the end); `None` for the whole run.
        warmup: Leading steps of the part that are left out of every figure.
        stride: One of so many steps becomes a point; see `Across`.
        spoilt: Steps of the run that a deep window slowed down: none of the part.
        bin_width: Measured steps that are one bin where the ranks are drawn side by side.
    """

    part: tuple[int, int | None] | None = None
    warmup: int = 0
    stride: int = 1
    spoilt: Spoilt = ()
    bin_width: int = 1

    def of(self, log: RankLog) -> RankLog:
        """Returns a rank's records of the part."""
        if self.part is None:
            return without_steps(log, self.spoilt)
        return without_steps(part_of(log, *self.part), self.spoilt, self.part[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank's figures. A new reading of every rank is a field here, and a line in `summarize`.

    Attributes:
        file: Name of its file.
        rank: Its number.
        world_size: How many ranks the job had, as the rank knew; `None` if it did not say.
        host: Name of its machine.
        error: Type of the uncaught exception that ended it.
        finished: Whether it closed its file.
        journal: Whether its file had a write-ahead log: `wal`, else `delete`; empty if it did not say.
        notes: What it said of its own measurement.
        phase_time_ns: Mean nanoseconds of each phase in a measured step.
        waits_ns: What it waits in each bin, see `analysis.late_bins`.
        standing_ns: See `core.profile.RankProfile`.
        working_ns: Likewise.
        gathering_ns: Likewise.
        exchanged_ns: Likewise.
        among_all_ns: Part of `exchanged_ns` that waits for all others together.
        averaged_ns: Likewise.
        clock: `HOST`, `LAUNCHES` or `DEVICE`.
        samples_per_s: 0 when no batch size could be read.
        tokens_per_s: Likewise.
        gap_parts: How its gaps divide among the phases.
        met_ns: When some of the ranks' meetings ended, by its own clock.
        stats: What the operating system says of it.
        ddp: Its `DistributedDataParallel`, if it has one.
        events: How often something happened.
    """

    file: str
    rank: int
    world_size: int | None = None
    host: str = ""
    error: str | None = None
    finished: bool = False
    journal: str = ""
    notes: tuple[str, ...] = ()
    phase_time_ns: Mapping[Phase, float] = field(default_factory=dict)
    waits_ns: tuple[float, ...] = ()
    standing_ns: float = 0.0
    working_ns: float = 0.0
    gathering_ns: float = 0.0
    exchanged_ns: float | None = 0.0
    among_all_ns: float = 0.0
    averaged_ns: float | None = 0.0
    clock: str = HOST
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    gap_parts: GapParts = field(default_factory=dict)
    met_ns: Mapping[int, int] = field(default_factory=dict)
    stats: HostStats = field(default_factory=HostStats)
    ddp: Ddp | None = None
    events: Mapping[str, int] = field(default_factory=dict)


def summarize(log: RankLog, place: int, window: Window, script: Script) -> tuple[RankSummary, Across]:
    """Summarizes one rank.

    Args:
        log: Its records.
        place: Its place among all ranks of the run.
        window: The steps to look at.
        script: What its source says.

    Returns:
        Its figures, and what becomes comparisons with other ranks.
    """
    log = window.of(log)
    warmup = min(window.warmup, len(log.steps))
    rows = log.steps[warmup:]
    roles = script.roles(log)
    parts = split_gaps(log, window.warmup, roles)
    series = divided(rows, parts)
    meta = log.meta
    summary = RankSummary(
        file=log.path.name,
        rank=rank_of(log),
        world_size=meta.get("world_size"),
        host=str(meta.get("host", "")),
        error=meta.get("error") or None,
        finished=bool(meta.get("finished", False)),
        journal=str(meta.get("journal", "")),
        notes=tuple(map(str, meta.get("notes", ()))),
        phase_time_ns={
            phase: float(times.mean()) if len(times) else 0.0 for phase, times in series.items()
        },
        waits_ns=waits_in_bins(series, window.bin_width),
        standing_ns=standing_ns(log, rows, window.warmup, roles, script.idioms),
        working_ns=working_ns(log, rows, window.warmup, roles, script.idioms),
        gathering_ns=gathering_ns(log, rows, window.warmup, roles),
        exchanged_ns=exchanged_ns(log),
        among_all_ns=among_all_ns(log),
        averaged_ns=averaged_ns(log),
        clock=_clock(log),
        samples_per_s=rate(rows, "samples"),
        tokens_per_s=rate(rows, "tokens"),
        gap_parts=parts,
        met_ns=kept(log.meetings, log.steps),
        stats=host_stats(log, window.warmup),
        ddp=ddp_of(log),
        events=count_events(log.events),
    )
    return summary, Across.of(place, series, waits_of(log, warmup), rows, window.stride)


def _clock(log: RankLog) -> str:
    if log.meta.get(BY_DEVICE):
        return DEVICE
    return HOST if log.meta.get("device", "cpu") == "cpu" else LAUNCHES


def why_incomparable(ranks: Sequence[RankSummary], *, by_meetings: bool) -> str:
    """Returns why the ranks' times do not tell which of them the others wait for; empty where they do.

    Args:
        ranks: All of them.
        by_meetings: Whether it was measured in each step what they wait for each other, on the host.
    """
    groups = {rank.ddp.ranks for rank in ranks if rank.ddp is not None and rank.ddp.ranks}
    clocks = {rank.clock for rank in ranks}
    if len(ranks) < 2:
        return ""
    if len(groups) > 1:
        return f"gradients are averaged in {len(groups)} groups of ranks"
    if by_meetings or clocks in ({HOST}, {DEVICE}):
        return ""
    if len(clocks) > 1:
        return "the steps of some ranks are by the clock of their device, those of others by the host's"
    return "the ranks train on devices, whose clock was not heard"


MEETING_SHARE = 0.75
"""Part of a rank's communication that must be with all others: what two ranks exchange, as the stages of a
pipeline do, tells nothing of who is late."""


def meet_in_all(ranks: Sequence[RankSummary], program: Program, *, by_meetings: bool) -> bool:
    """Whether all that ranks wait for each other is in their communication, step by step: on CPUs, where
    DDP's waits were measured, or the loop averages its gradients itself, or FSDP2 does.

    Args:
        ranks: All of them.
        program: What the first one trains with.
        by_meetings: Whether it was measured in each step what they wait for gradients of DDP.
    """
    if any(rank.clock != HOST for rank in ranks):
        return False
    for rank in ranks:
        met_ns = rank.phase_time_ns.get(Phase.COMMUNICATION, 0.0)
        if rank.exchanged_ns is None:
            return False
        if rank.exchanged_ns - rank.among_all_ns > (1 - MEETING_SHARE) * met_ns:
            return False
    if any(rank.ddp is not None for rank in ranks):
        return by_meetings
    averaging = program.averaging
    return program.fsdp is not None or (averaging is not None and averaging.is_of_gradients)


def with_idleness(pipeline: Pipeline | None, ranks: Sequence[RankSummary]) -> Pipeline | None:
    """Returns a pipeline with what even the rank that waits least waits for its neighbours, on CPUs.

    Args:
        pipeline: What the first rank told of it.
        ranks: All that were looked at.
    """
    if pipeline is None or len(ranks) < pipeline.num_ranks or any(rank.clock != HOST for rank in ranks):
        return pipeline
    waits_ns = [
        min(rank.exchanged_ns, rank.phase_time_ns.get(Phase.COMMUNICATION, 0.0))
        for rank in ranks
        if rank.exchanged_ns is not None
    ]
    return replace(pipeline, idle_ns=min(waits_ns)) if len(waits_ns) == len(ranks) else pipeline


def of_first_group(ranks: Sequence[RankSummary]) -> Sequence[RankSummary]:
    """Returns the ranks that average gradients with the first. Those of other groups are of another axis of
    the mesh, as with tensor parallelism, and see the same batches."""
    group = ranks[0].ddp.ranks if ranks[0].ddp is not None else ()
    if not group:
        return ranks
    return [rank for rank in ranks if rank.ddp is None or rank.ddp.ranks in ((), group)]


def count_events(events: Iterable[tuple[int, int, str, dict[str, Any]]]) -> dict[str, int]:
    """Counts what happened, by kind, without what tuning and deep windows did."""
    return dict(Counter(kind for _, _, kind, _ in events if kind not in (*KINDS, DEEP)))
