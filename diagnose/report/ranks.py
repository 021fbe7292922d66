"""The ranks side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.units import NS_PER_MS, format_part
from diagnose.report._charts import RankMap, StepBins
from diagnose.report.base import Block, Column, Row, Section, Table

MAX_RANKS = 32  # more rows than this are a dashboard's business
SMALLEST_SHARE = 0.005  # a phase below this on every rank gets no column


class Ranks(Section):
    """Each rank's ledger, where there is more than one rank."""

    order = 60
    title = "Ranks"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        if len(profile.ranks) < 2:
            return []
        phases = [phase for phase in Phase if any(weighs(rank, phase) for rank in profile.ranks)]
        ranks = sorted(profile.ranks, key=lambda rank: (-(rank.late_ns_per_step or 0.0), rank.rank))
        columns = [
            Column(title="rank", number=True),
            Column(title="host", code=True),
            Column(title="late", number=True),
            Column(title="step", number=True),
            *(Column(title=phase.label, number=True) for phase in phases),
        ]
        shown = f"{MAX_RANKS} of {len(ranks)} ranks" if len(ranks) > MAX_RANKS else "All ranks"
        table = Table(
            caption=f"{shown}, the latest first. Mean time per step; late is how long the others "
            "waited for the rank.",
            columns=tuple(columns),
            rows=tuple(row(rank, phases) for rank in ranks[:MAX_RANKS]),
        )
        drawn = rank_map(profile)
        return [drawn, table] if drawn is not None else [table]


def rank_map(profile: Profile) -> RankMap | None:
    """Returns when each rank was late; of many the latest. `None` where nobody was, or it is not known."""
    late = profile.history.late if profile.history is not None else None
    if late is None:
        return None
    late_ns = np.array(late.late_ns)
    if not np.nansum(late_ns):
        return None
    with np.errstate(invalid="ignore"):
        means = np.nan_to_num(late_ns).mean(axis=1)
    rows = np.sort(np.argsort(-means, kind="stable")[:MAX_RANKS])
    which = (
        f"the {MAX_RANKS} latest of {len(late.ranks):,} ranks"
        if len(rows) < len(late.ranks)
        else "each rank"
    )
    return RankMap(
        title=f"How long the others waited for {which} over the measured steps, in ms per step",
        steps=StepBins(first=late.first, width=late.width, end=profile.steps.count),
        ranks=[late.ranks[row] for row in rows],
        values_ms=late_ns[rows] / NS_PER_MS,
    )


def weighs(rank: RankProfile, phase: Phase) -> bool:
    """Says whether a phase is large enough on this rank to be shown for all."""
    step_ns = sum(rank.phase_time_ns.values())
    return rank.phase_time_ns.get(phase, 0.0) > SMALLEST_SHARE * step_ns


def row(rank: RankProfile, phases: Sequence[Phase]) -> Row:
    """Returns one rank's figures; what it did not measure stays blank."""
    step_ns = sum(rank.phase_time_ns.values())
    times = [rank.late_ns_per_step, step_ns, *(rank.phase_time_ns.get(phase) for phase in phases)]
    figures = ["" if time is None else format_part(time, step_ns) for time in times]
    return Row(cells=(f"{rank.rank}", rank.host, *figures))
