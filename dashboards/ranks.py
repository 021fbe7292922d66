"""The ranks side by side: who is late, when, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown, tabs
from diagnose.dashboards._look_ranks import (
    FEW_CELLS,
    MAX_CELLS,
    MAX_ROWS,
    chosen_map,
    latest_rows,
    map_of,
    range_of,
)
from diagnose.dashboards._look_run import RunPage
from diagnose.dashboards._look_tuning import is_running
from diagnose.dashboards._snapshot import Lateness, Snapshot
from diagnose.dashboards.base import href

from diagnose.analysis.lateness import slower_in, straggler
from diagnose.core.units import NS_PER_MS, format_duration
from diagnose.report.base import Column, Fact, Facts, Row, Table
from diagnose.report.ranks import Ranks as RanksSection

NAME = "ranks"
MAX_LISTED = 10
"""A table of so many ranks is 13 KB."""

BY_MEETINGS = "How long the others waited for a rank that came last, in ms per step; darker is later."
BY_WAITING = "What a rank waits less than the usual one, in ms per step: so long the others wait for it."


class Ranks(RunPage):
    """Rank by step: how late each rank is, what it waits for, and which one the others wait for."""

    name = NAME
    title = "Ranks"
    order = 40

    def key(self, snap: Snapshot) -> tuple[Any, ...]:
        late = snap.lateness
        drawn = None
        if late is not None:
            now = late.now and late.now.rank
            drawn = (late.late.width, late.late.values_ms.shape, late.communication.values_ms.shape, now)
        return (drawn, snap.ranks if snap.over else ())

    def draw(self, snap: Snapshot, query: Mapping[str, str]) -> list[Component]:
        late = snap.lateness
        if late is None:
            words = "With one process there is nobody to wait for. Under `--nproc-per-node` or torchrun"
            return [
                empty(
                    "This run has one rank",
                    f"{words} every rank is recorded and this page shows who is late.",
                    f"diagnose run --nproc-per-node 2 {snap.script}",
                )
            ]
        made = shown([Facts(items=tuple(_headline(snap, late)), headline=True)])
        made += _maps(snap, late, query)
        if snap.profile is not None:
            ranks = sorted(snap.profile.ranks, key=lambda rank: -(rank.late_ns_per_step or 0.0))
            blocks = RanksSection().blocks(
                replace(snap.profile, ranks=tuple(ranks[:MAX_LISTED]), history=None)
            )
            if blocks:
                note = (
                    f"The latest {MAX_LISTED} of {len(ranks):,} ranks." if len(ranks) > MAX_LISTED else ""
                )
                made.append(panel(RanksSection.title, *shown(blocks), note=note))
        troubled = [rank for rank in snap.ranks if rank.words]
        if troubled:
            table = Table(
                caption="Files that could be read only in part.",
                columns=(Column(title="rank"), Column(title="what is wrong")),
                rows=tuple(Row(cells=(f"{rank.number}", rank.words)) for rank in troubled[:MAX_ROWS]),
            )
            made.append(panel("Damage", *shown([table])))
        return made


def _headline(snap: Snapshot, late: Lateness) -> list[Fact]:
    facts = []
    if snap.profile is None:
        facts.append(
            Fact(label="straggler", value="not known yet", detail=snap.analysis or "being analysed")
        )
    elif snap.left_out:
        facts.append(Fact(label="straggler", value="not known", detail="the first rank alone was analysed"))
    elif snap.profile.ranks_comparable is None:
        facts.append(Fact(label="straggler", value="not known", detail="the ranks' times do not compare"))
    else:
        found = straggler(snap.profile.ranks)
        if found is None:
            facts.append(
                Fact(label="straggler", value="none", detail="none is later than the others scatter")
            )
        else:
            behind = f"{format_duration(found.late_ns)} per step late"
            facts.append(Fact(label="straggler", value=f"rank {found.rank}", detail=behind))
            if found.cause is not None:
                where = slower_in(snap.profile.ranks, found.rank, found.cause)
                facts.append(Fact(label="cause", value=where, detail="where it exceeds the median rank"))
    if is_running(snap) and late.now is not None:
        detail = f"{format_duration(late.now.late_ns)} per step, in the newest {late.now.num_steps:,} steps"
        facts.append(Fact(label="late now", value=f"rank {late.now.rank}", detail=detail))
    if np.nansum(late.communication.values_ms):  # none: nobody measured what these ranks wait for
        facts.append(
            Fact(
                label="exposed communication",
                value=format_duration(float(np.nanmean(late.communication.values_ms)) * NS_PER_MS),
                detail="per step, mean of all ranks",
            )
        )
    return [*facts, Fact(label="ranks", value=f"{len(late.ranks):,}")]


def _maps(snap: Snapshot, late: Lateness, query: Mapping[str, str]) -> list[Component]:
    chosen = range_of(query, late.ranks)
    note = BY_MEETINGS if late.by_meetings else BY_WAITING
    many = len(late.ranks) > MAX_ROWS
    made = []
    if many:
        late_ns = {} if snap.profile is None else _late_ns(snap)
        rows = latest_rows(late, late_ns)
        made.append(panel("The latest ranks", chart(chosen_map(late, rows)), note=note))
    together = chosen.together
    each = f"{note} Each row is the latest of {together} ranks." if together > 1 else note
    title = "Lateness of each rank over the steps, in milliseconds"
    made.append(
        panel(
            "How late each rank is",
            *([_ranges(snap, late, query)] if many else []),
            chart(map_of(late, late.late, chosen, title, highest=True)),
            note=each,
        )
    )
    if np.nansum(late.communication.values_ms):
        title = "Exposed communication of each rank over the steps"
        cells = FEW_CELLS if many else MAX_CELLS
        words = "Time in which a rank only waited for a collective. The late rank itself waits least."
        if together > 1:
            words += f" Each row is the one of {together} ranks that waits least."
        made.append(
            panel(
                "Exposed communication",
                chart(map_of(late, late.communication, chosen, title, highest=False, max_cells=cells)),
                note=words,
            )
        )
    return made


def _ranges(snap: Snapshot, late: Lateness, query: Mapping[str, str]) -> Component:
    """Returns links to all ranks, to the range that is shown, and to its parts."""
    chosen, everybody = range_of(query, late.ranks), range_of({}, late.ranks)
    everything = f"All {len(late.ranks):,}"
    addresses = {everything: href(NAME, snap.id)}
    for part in dict.fromkeys([*everybody.parts(), chosen, *chosen.parts()]):
        if part != everybody:
            named = part.named(late.ranks)
            addresses[named] = href(NAME, snap.id, ranks=named)
    current = everything if chosen == everybody else chosen.named(late.ranks)
    return tabs(addresses, current, "Which ranks")


def _late_ns(snap: Snapshot) -> dict[int, float]:
    assert snap.profile is not None
    if snap.left_out:
        return {}
    return {rank.rank: rank.late_ns_per_step or 0.0 for rank in snap.profile.ranks}
