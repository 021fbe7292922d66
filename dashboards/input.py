"""Where a batch comes from, and how long the loop waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import numpy as np
from dash import html
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown
from diagnose.dashboards._look_run import RunPage, known
from diagnose.dashboards._snapshot import Snapshot, Vector

from diagnose.core.input import SlowBatch
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader
from diagnose.core.units import format_duration, format_share
from diagnose.report._charts import StepBins, StepLine
from diagnose.report._wording import place
from diagnose.report.base import Column, Fact, Facts, Row, Table
from diagnose.report.input import Input as InputSection
from diagnose.report.summary import sentence

MAX_LINES = 15
BY_CHANCE = 0.05
"""So many samples may be in several of the slowest batches by chance, where they are named."""

NAMED_SAMPLES = 6
"""Samples of a batch that are named: enough to ask the dataset for them."""


class InputPipeline(RunPage):
    """The loaders, their workers, how long each stage takes, and the lines that it is spent in."""

    name = "input"
    title = "Input"
    order = 30

    def key(self, snap: Snapshot) -> tuple[Any, ...]:
        return (snap.overview.width, len(snap.overview), len(snap.marks))

    def draw(self, snap: Snapshot, query: Mapping[str, str]) -> list[Component]:
        profile = known(snap)
        if profile is None:
            return [empty("Not analysed yet", snap.analysis or "The first figures take a few seconds.")]
        if profile.steps.measured <= 0:
            why = profile.run.lost or "without steps nothing is known of how their data came"
            return [empty("No step was measured", sentence(why))]
        made = shown([Facts(items=tuple(_headline(profile)), headline=True)])
        waits = snap.overview.phase_ms.get(Phase.DATA_WAIT)
        if waits is not None and np.nansum(waits):
            made.append(
                panel(
                    "Waiting for data, step by step",
                    chart(_waiting(snap, waits), height=220),
                )
            )
        section = InputSection()
        blocks = section.blocks(profile)
        if blocks:
            made.append(panel(section.title, *shown(blocks)))
        made += _slowest(profile)
        if profile.program.loaders:
            made.append(panel("Loaders", *shown([_loaders(profile.program.loaders)])))
        lines = _lines(profile)
        if lines is not None:
            made.append(panel("Lines that make a batch", *shown([lines])))
        if not blocks and not profile.program.loaders:
            made.append(
                empty("No DataLoader was seen", "The loop builds its batches itself; see the lines above.")
            )
        return made


def _waiting(snap: Snapshot, waits: Vector) -> StepLine:
    return StepLine(
        title="Milliseconds per step spent waiting for the next batch, over the steps",
        unit="ms waited per step",
        steps=StepBins(first=snap.overview.first, width=snap.overview.width, marks=snap.marks),
        values=waits,
    )


def _headline(profile: Profile) -> list[Fact]:
    share = profile.share(Phase.DATA_WAIT)
    if share is None:
        return [Fact(label="waiting for data", value="not measured")]
    waited = format_duration(profile.phase_time_ns[Phase.DATA_WAIT])
    facts = [Fact(label="waiting for data", value=waited, detail=f"per step, {format_share(share)} of it")]
    stats = profile.input
    if stats.burst_share and stats.burst_ns is not None:
        often = f"in {format_share(stats.burst_share)} of the steps"
        if stats.burst_period:
            often += f", every {stats.burst_period:,} steps"
        facts.append(
            Fact(label="in bursts", value=format_duration(stats.burst_ns), detail=f"per step, {often}")
        )
    workers = stats.workers
    if workers is not None and workers.tail_batches and workers.longest_ns is not None:
        detail = f"{format_share(workers.tail_batches)} of the batches take over twice the median"
        facts.append(Fact(label="slowest batch", value=format_duration(workers.longest_ns), detail=detail))
    return facts


def _slowest(profile: Profile) -> list[Component]:
    """Returns the batches that took longest, and what was in them."""
    workers = profile.input.workers
    if workers is None:
        words = (
            "Batches are timed one by one in worker processes only; here the training thread makes them."
        )
        return (
            [panel("The slowest batches", html.P(words, className="words"))]
            if profile.program.loaders
            else []
        )
    if not workers.slowest:
        return []
    usual = workers.median_ns or workers.fetch_ns + workers.collate_ns
    table = Table(
        caption=f"A usual batch takes {format_duration(usual)}. Samples are what was asked of the dataset.",
        columns=(
            Column(title="took", number=True),
            Column(title="of a usual one", number=True),
            Column(title="worker", number=True),
            Column(title="its batch", number=True),
            Column(title="there in step", number=True),
            Column(title="samples", code=True),
        ),
        rows=tuple(
            Row(
                cells=(
                    format_duration(batch.took_ns),
                    f"{batch.took_ns / usual:.1f}x" if usual else "",
                    f"{batch.worker}",
                    f"{batch.before + 1:,}",
                    "" if batch.step is None else f"{batch.step + 1:,}",
                    _samples(batch),
                )
            )
            for batch in workers.slowest
        ),
    )
    shared = _shared(workers.slowest, profile.program.loaders)
    named = ", ".join(f"sample {index:,}" for index in shared)
    note = f"In more of them than chance explains: {named}." if shared else ""
    return [panel("The slowest batches", *shown([table]), note=note)]


def _samples(batch: SlowBatch) -> str:
    if not batch.samples:
        return "of a stream"
    named = ", ".join(map(str, batch.samples[:NAMED_SAMPLES]))
    more = (batch.num_samples or len(batch.samples)) - NAMED_SAMPLES
    return f"{named} and {more:,} more" if more > 0 else named


def _shared(batches: Sequence[SlowBatch], loaders: Sequence[Loader]) -> list[int]:
    """Returns samples that more of the batches hold than shuffling alone explains: one that is slow makes
    each batch slow that holds it."""
    later = [batch for batch in batches if batch.before]  # a worker's first one is slow for another reason
    length = next((loader.dataset_length for loader in loaders if loader.num_workers), None)
    if len(later) < 2 or not length:
        return []
    share = sum(len(batch.samples) for batch in later) / len(later) / length
    often = range(2, len(later) + 1)
    enough = next((n for n in often if length * comb(len(later), n) * share**n < BY_CHANCE), None)
    seen = Counter(index for batch in later for index in set(batch.samples))
    return [index for index, n in seen.most_common(NAMED_SAMPLES) if enough is not None and n >= enough]


def _loaders(loaders: tuple[Loader, ...]) -> Table:
    return Table(
        caption="Every DataLoader that fed a training step, as the script made it.",
        columns=(
            Column(title="dataset", code=True),
            Column(title="samples", number=True),
            Column(title="batch", number=True),
            Column(title="workers", number=True),
            Column(title="prefetch", number=True),
            Column(title="persistent"),
            Column(title="pinned"),
            Column(title="epochs", number=True),
            Column(title="made at", code=True),
        ),
        rows=tuple(
            Row(
                cells=(
                    loader.dataset,
                    "" if loader.dataset_length is None else f"{loader.dataset_length:,}",
                    "" if loader.batch_size is None else f"{loader.batch_size:,}",
                    f"{loader.num_workers}",
                    "" if loader.prefetch_factor is None else f"{loader.prefetch_factor}",
                    "yes" if loader.persistent_workers else "no",
                    "yes" if loader.pin_memory else "no",
                    f"{loader.epochs:,}",
                    place(loader),
                ),
                source=loader.call,
            )
            for loader in loaders
        ),
    )


def _lines(profile: Profile) -> Table | None:
    lines = [line for line in profile.where if line.in_worker or line.phase is Phase.DATA_WAIT]
    if not lines:
        return None
    return Table(
        caption="Sampled. Shares are of the step; in a worker, of the workers' busy time.",
        columns=(
            Column(title="line", code=True),
            Column(title="function", code=True),
            Column(title="where"),
            Column(title="share", number=True),
        ),
        rows=tuple(
            Row(
                cells=(
                    place(line),
                    line.function,
                    "worker" if line.in_worker else "training thread",
                    format_share(line.share),
                ),
                phase=Phase.DATA_WAIT,
                share=line.share,
                source=line.text,
            )
            for line in lines[:MAX_LINES]
        ),
    )
