"""Memory, CPUs and the device over the run's clock, as the operating system and the driver see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from diagnose.core.history import Readings
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes
from diagnose.report._charts import TimeLines, Vector
from diagnose.report.base import Block, Fact, Facts, Section

LANES = {
    "memory": ("Memory of the training process over time", "MiB", 2**20),
    "cpus": ("CPUs in use over time: by training, by its workers, by all programs together", "CPUs", 1),
    "device": ("The device over time: kernels running, clock of the highest, power of its limit", "%", 1),
}
"""Title and unit of each chart, and how much of what is read makes one of that."""

FEW_CPUS = 0.05
"""Fewer on average are nobody's work."""


class OverTime(Section):
    """What the training process and its workers took, from the first step to the last."""

    order = 56
    title = "Memory and CPUs"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        history = profile.history
        if history is None:
            return []
        facts = [*_memory(history.memory_bytes), *_cpus(history.cpus)]
        made: list[Block] = [Facts(items=tuple(facts))] if facts else []
        for name, readings in (
            ("memory", history.memory_bytes),
            ("cpus", history.cpus),
            ("device", history.device_percent),
        ):
            if len(readings.seconds) > 1 and readings.values:
                lines = {of: np.array(values) for of, values in readings.values.items()}
                made.append(lane(name, np.array(readings.seconds), lines))
        return made


def lane(name: str, seconds: Vector, lines: Mapping[str, Vector]) -> TimeLines:
    """Draws readings of one of `LANES` over time."""
    title, unit, scale = LANES[name]
    return TimeLines(
        title=title, unit=unit, seconds=seconds, lines={of: values / scale for of, values in lines.items()}
    )


def _memory(readings: Readings) -> list[Fact]:
    resident = readings.values.get("resident")
    if resident is None:
        return []
    most = format_bytes(float(np.nanmax(resident)))
    return [Fact(label="memory", value=most, detail="at most, of the training process")]


def _cpus(readings: Readings) -> list[Fact]:
    labels = {"training process": "CPUs", "its workers": "CPUs of its workers"}
    means = {name: float(np.nanmean(readings.values[name])) for name in labels if name in readings.values}
    return [
        Fact(label=labels[name], value=f"{mean:.1f}", detail="in use, on average")
        for name, mean in means.items()
        if mean >= FEW_CPUS
    ]
