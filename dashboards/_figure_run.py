"""What the charts of a run show, from a snapshot of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dash import html
from diagnose.dashboards._look_blocks import Component, swatch
from diagnose.dashboards._snapshot import DeviceLane, Snapshot, Steps, Vector

from diagnose.core.units import format_share
from diagnose.report._charts import Mark, PhaseAreas, StepLine, TimeLines

MIB = 2**20
SMALLEST_SHARE = 0.0005
"""What would be called 0.0 % is not seen in the chart either."""
MAX_READINGS = 240
"""Readings of the operating system that are drawn: more would neither be seen nor sent in time."""


def ledger(steps: Steps, marked: Sequence[Mark]) -> PhaseAreas:
    """Time per step of each phase over the steps."""
    return PhaseAreas(
        title="Time per step of each phase, stacked, over the steps; the ledger below has the figures",
        first=steps.first,
        width=steps.width,
        phase_ms=steps.phase_ms,
        marks=_within(steps, marked),
    )


def throughput(steps: Steps, marked: Sequence[Mark]) -> StepLine:
    """Samples per second over the steps; steps per second where no batch size is known."""
    known = bool(np.nansum(steps.samples_per_s))
    with np.errstate(divide="ignore"):
        values = steps.samples_per_s if known else 1000.0 / steps.step_ms
    return StepLine(
        title="Throughput over the steps, with what tuning did marked",
        unit="samples/s" if known or not len(steps) else "steps/s",
        first=steps.first,
        width=steps.width,
        values=values,
        marks=_within(steps, marked),
    )


def memory(snap: Snapshot) -> TimeLines:
    """Memory of the training process over time, and what it has of the device's."""
    vitals = snap.vitals
    seconds, (resident, held, reserved) = _thinned(
        vitals.time_s, vitals.resident_bytes, vitals.allocated_bytes, vitals.reserved_bytes
    )
    return TimeLines(
        title="Memory of the training process over time",
        unit="MiB",
        seconds=seconds,
        lines={
            "resident": resident / MIB,
            "device, in tensors": held / MIB,
            "device, reserved": reserved / MIB,
        },
    )


def device(snap: Snapshot) -> TimeLines:
    """What the device's driver says over time."""
    lane = snap.vitals.device or DeviceLane()
    seconds, (busy, clock, power) = _thinned(
        lane.time_s, lane.busy_percent, lane.clock_percent, lane.power_percent
    )
    return TimeLines(
        title="The device over time: kernels running, clock of the highest, power of its limit",
        unit="%",
        seconds=seconds,
        lines={"kernels running": busy, "clock": clock, "power": power},
    )


def cpus(snap: Snapshot) -> TimeLines:
    """CPUs in use over time, and by whom."""
    vitals = snap.vitals
    seconds, (own, children, everybody) = _thinned(
        vitals.time_s, vitals.process_cpus, vitals.child_cpus, vitals.busy_cpus
    )
    return TimeLines(
        title="CPUs in use over time: by training, by its workers, by all programs together",
        unit="CPUs",
        seconds=seconds,
        lines={"training process": own, "its workers": children, "all programs": everybody},
    )


def legend(steps: Steps) -> Component:
    """Names each phase beside its colour, with its share of these steps."""
    whole = float(np.nansum(steps.step_ms * steps.counts))
    items = []
    for phase, times in steps.phase_ms.items():
        part = float(np.nansum(times * steps.counts)) / whole if whole else 0.0
        if part >= SMALLEST_SHARE:
            items.append(html.Li([swatch(phase), f"{phase.label} {format_share(part)}"]))
    return html.Ul(items, className="legend", **{"aria-label": "Phases and their share of these steps"})


def _within(steps: Steps, marked: Sequence[Mark]) -> tuple[Mark, ...]:
    end = steps.first + steps.width * len(steps)
    return tuple(mark for mark in marked if steps.first <= mark.step <= end)


def _thinned(seconds: Vector, *readings: Vector) -> tuple[Vector, list[Vector]]:
    """Returns means of so many neighbours that few enough points remain; NaN where none was measured."""
    width = -(-len(seconds) // MAX_READINGS)
    if width <= 1:
        return seconds, list(readings)
    firsts = np.arange(0, len(seconds), width)
    means = []
    for values in readings:
        known = np.isfinite(values)
        counts = np.add.reduceat(known.astype(float), firsts)
        sums = np.add.reduceat(np.where(known, values, 0.0), firsts)
        means.append(np.divide(sums, counts, out=np.full(len(firsts), np.nan), where=counts > 0))
    return seconds[firsts], means
