"""The ranks side by side: who is late, when, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown
from diagnose.dashboards._look_run import body, refreshed
from diagnose.dashboards._snapshot import Lateness, Snapshot, Vector
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import Page, View

from diagnose.core.units import NS_PER_MS, format_duration
from diagnose.report._charts import RankMap
from diagnose.report.base import Column, Fact, Facts, Row, Table
from diagnose.report.ranks import Ranks as RanksSection

NAME = "ranks"
MAX_CELLS = 5_000
"""Two maps of so many values are 54 KB; a screen does not resolve more."""


class Ranks(Page):
    """Rank by step: how late each rank is, what it waits for, and which one the others wait for."""

    title = "Ranks"
    order = 40

    def layout(self, view: View, source: Source) -> Any:
        """See `Page`."""
        return body(NAME)

    def callbacks(self, app: Any, source: Source) -> None:
        """See `Page`."""
        refreshed(app, source, NAME, _draw, _seen)


def _seen(snap: Snapshot) -> tuple[Any, ...]:
    late = snap.lateness
    return (None if late is None else (late.width, late.late_ms.shape), snap.ranks if snap.over else ())


def _draw(snap: Snapshot) -> list[Component]:
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
    made = shown([Facts(items=tuple(_headline(late)), headline=True)])
    made.append(
        panel(
            "How late each rank is",
            chart(_map(late, late.late_ms, "Lateness of each rank over the steps, in milliseconds")),
            note="Own work beyond that of the median rank, in ms per step; darker is later.",
        )
    )
    if np.nansum(late.communication_ms):
        made.append(
            panel(
                "Exposed communication",
                chart(
                    _map(late, late.communication_ms, "Exposed communication of each rank over the steps")
                ),
                note="Time in which a rank only waited for a collective. The late rank itself waits least.",
            )
        )
    if snap.profile is not None:
        section = RanksSection()
        blocks = section.blocks(snap.profile)
        if blocks:
            made.append(panel(section.title, *shown(blocks)))
    troubled = [rank for rank in snap.ranks if rank.words]
    if troubled:
        table = Table(
            caption="Files that could be read only in part.",
            columns=(Column(title="rank"), Column(title="what is wrong")),
            rows=tuple(Row(cells=(f"{rank.number}", rank.words)) for rank in troubled),
        )
        made.append(panel("Damage", *shown([table])))
    return made


def _headline(late: Lateness) -> list[Fact]:
    facts = []
    if late.straggler is None:
        facts.append(Fact(label="straggler", value="none", detail="none is later than the others scatter"))
    else:
        behind = format_duration(late.straggler_ms * NS_PER_MS)
        facts.append(
            Fact(label="straggler", value=f"rank {late.straggler}", detail=f"{behind} per step late")
        )
        if late.cause is not None:
            facts.append(
                Fact(label="cause", value=late.cause.label, detail="where it exceeds the median rank")
            )
    if np.nansum(late.communication_ms):  # none at all: nobody measured what these ranks wait for
        facts.append(
            Fact(
                label="exposed communication",
                value=format_duration(float(np.nanmean(late.communication_ms)) * NS_PER_MS),
                detail="per step, mean of all ranks",
            )
        )
    return [*facts, Fact(label="ranks", value=f"{len(late.ranks)}")]


def _map(late: Lateness, values: Vector, title: str) -> RankMap:
    width = late.width
    while values.size > MAX_CELLS:
        values, width = _halved(values), 2 * width
    return RankMap(title=title, first=late.first, width=width, ranks=late.ranks, values_ms=values)


def _halved(values: Vector) -> Vector:
    """Returns means of two bins each; NaN where neither was read."""
    ranks, bins = values.shape
    pairs = np.full((ranks, bins + bins % 2), np.nan)
    pairs[:, :bins] = values
    pairs = pairs.reshape(ranks, -1, 2)
    known = np.isfinite(pairs)
    counts = known.sum(axis=2)
    sums = np.where(known, pairs, 0.0).sum(axis=2)
    return np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
