"""What the charts of a run show, from a snapshot of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dash import html
from diagnose.dashboards._look_blocks import Component, swatch
from diagnose.dashboards._snapshot import Snapshot, Steps

from diagnose.analysis.readings import cpus_of, device_lane, memory_of
from diagnose.core.units import format_share
from diagnose.report import readings
from diagnose.report._charts import Mark, PhaseAreas, StepBins, StepLine, TimeLines
from diagnose.report.phases import clocks

READ = {"memory": memory_of, "cpus": cpus_of, "device": device_lane}
"""What reads each of `readings.LANES`."""

SMALLEST_SHARE = 0.0005
"""What would be called 0.0 % is not seen in the chart either."""


def ledger(steps: Steps, marked: Sequence[Mark]) -> PhaseAreas:
    """Time per step of each phase over the steps."""
    return PhaseAreas(
        title="Time per step of each phase, stacked, over the steps; the ledger below has the figures",
        steps=_bins(steps, marked),
        phase_ms=steps.phase_ms,
    )


def throughput(steps: Steps, marked: Sequence[Mark]) -> StepLine:
    """Samples per second over the steps; steps per second where no batch size is known."""
    known = bool(np.nansum(steps.samples_per_s))
    with np.errstate(divide="ignore"):
        values = steps.samples_per_s if known else 1000.0 / steps.step_ms
    return StepLine(
        title="Throughput over the steps, with what tuning did marked",
        unit="samples/s" if known or not len(steps) else "steps/s",
        steps=_bins(steps, marked),
        values=values,
    )


def lane(name: str, snap: Snapshot) -> TimeLines:
    """Memory, CPUs or what the device's driver says over time."""
    return readings.lane(name, *READ[name](snap.vitals))


def legend(steps: Steps, device_share: float | None = None) -> Component:
    """Names each phase beside its colour, with its share of these steps; and whose clock tells it, where
    that is a device's."""
    whole = float(np.nansum(steps.step_ms * steps.counts))
    items = []
    for phase, times in steps.phase_ms.items():
        part = float(np.nansum(times * steps.counts)) / whole if whole else 0.0
        if part >= SMALLEST_SHARE:
            items.append(html.Li([swatch(phase), f"{phase.label} {format_share(part)}"]))
    named = html.Ul(items, className="legend", **{"aria-label": "Phases and their share of these steps"})
    if device_share is None:
        return named
    return html.Div([named, html.P(clocks(device_share), className="note")])


def _bins(steps: Steps, marked: Sequence[Mark]) -> StepBins:
    end = steps.first + steps.width * len(steps)
    within = tuple(mark for mark in marked if steps.first <= mark.step <= end)
    return StepBins(first=steps.first, width=steps.width, marks=within)
