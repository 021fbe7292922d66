"""Running totals of the operating system to rates and levels over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._snapshot import Vitals

from diagnose.core.units import NS_PER_S

MAX_POINTS = 600


def vitals_of(readings: Sequence[tuple[int, int, dict[str, Any]]], begun_ns: int) -> Vitals:
    """Returns readings as series.

    Args:
        readings: Time, step, running totals by name; in order.
        begun_ns: When the run's first step ended, by the same clock.
    """
    if not readings:
        return Vitals()
    readings = [*readings[: -1 : 1 + len(readings) // MAX_POINTS], readings[-1]]
    time_s = np.array([time_ns - begun_ns for time_ns, _, _ in readings]) / NS_PER_S

    def level(name: str) -> npt.NDArray[np.float64]:
        values = (totals.get(name) for _, _, totals in readings)
        return np.array(
            [value if isinstance(value, (int, float)) else np.nan for value in values], dtype=float
        )

    def per_s(name: str) -> npt.NDArray[np.float64]:
        rates = np.full(len(readings), np.nan)
        elapsed_s = np.diff(time_s)
        np.divide(np.diff(level(name)), elapsed_s, out=rates[1:], where=elapsed_s > 0)
        return rates

    return Vitals(
        time_s=time_s,
        step=np.array([step for _, step, _ in readings], dtype=float),
        resident_bytes=level("resident_bytes"),
        swapped_bytes=level("swapped_bytes"),
        process_cpus=per_s("cpu_ns") / NS_PER_S,
        child_cpus=per_s("child_cpu_ns") / NS_PER_S,
        busy_cpus=per_s("machine_busy_ns") / NS_PER_S,
    )
