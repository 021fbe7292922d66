"""Memory, CPUs and the device over the run's clock, as the operating system and the driver see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from diagnose.core.history import Readings
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes
from diagnose.report._charts import TimeLines, Vector
from diagnose.report.base import Block, Fact, Facts, Section

MIB = 2**20
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
        for readings, chart in (
            (history.memory_bytes, memory),
            (history.cpus, cpus),
            (history.device_percent, device),
        ):
            if len(readings.seconds) > 1 and readings.values:
                lines = {name: np.array(values) for name, values in readings.values.items()}
                made.append(chart(np.array(readings.seconds), lines))
        return made


def memory(seconds: Vector, lines: Mapping[str, Vector]) -> TimeLines:
    """Draws memory over time, given in bytes."""
    return TimeLines(
        title="Memory of the training process over time",
        unit="MiB",
        seconds=seconds,
        lines={name: values / MIB for name, values in lines.items()},
    )


def cpus(seconds: Vector, lines: Mapping[str, Vector]) -> TimeLines:
    """Draws CPUs in use over time, and by whom."""
    return TimeLines(
        title="CPUs in use over time: by training, by its workers, by all programs together",
        unit="CPUs",
        seconds=seconds,
        lines=lines,
    )


def device(seconds: Vector, lines: Mapping[str, Vector]) -> TimeLines:
    """Draws what the device's driver says over time, in percent."""
    return TimeLines(
        title="The device over time: kernels running, clock of the highest, power of its limit",
        unit="%",
        seconds=seconds,
        lines=lines,
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
