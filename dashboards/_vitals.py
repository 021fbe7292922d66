"""Running totals of the operating system, and readings of the device, to rates and levels over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._snapshot import DeviceLane, Vitals

from diagnose.core.units import NS_PER_S

MAX_POINTS = 600


def vitals_of(
    readings: Sequence[tuple[int, int, dict[str, Any]]], begun_ns: int, constants: Mapping[str, Any]
) -> Vitals:
    """Returns readings as series.

    Args:
        readings: Time, step, running totals by name; in order.
        begun_ns: When the run's first step ended, by the same clock.
        constants: Figures of the device that do not change, see `launch.nvml.Nvml.constants`.
    """
    if not readings:
        return Vitals()
    device = _device([_dict(totals.get("device")) for _, _, totals in readings], begun_ns, constants)
    readings = [*readings[: -1 : 1 + len(readings) // MAX_POINTS], readings[-1]]
    time_s = np.array([time_ns - begun_ns for time_ns, _, _ in readings]) / NS_PER_S

    def level(name: str) -> npt.NDArray[np.float64]:
        return _numbers(totals.get(name) for _, _, totals in readings)

    def of_allocator(name: str) -> npt.NDArray[np.float64]:
        return _numbers(_dict(totals.get("allocator")).get(name) for _, _, totals in readings)

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
        allocated_bytes=of_allocator("allocated_bytes"),
        reserved_bytes=of_allocator("reserved_bytes"),
        device=device,
    )


def _device(
    readings: Sequence[Mapping[str, Any]], begun_ns: int, constants: Mapping[str, Any]
) -> DeviceLane | None:
    readings = [reading for reading in readings if "time_ns" in reading]
    if not readings:
        return None

    def level(name: str) -> npt.NDArray[np.float64]:
        return _numbers(reading.get(name) for reading in readings)

    return DeviceLane(
        time_s=(level("time_ns") - begun_ns) / NS_PER_S,
        busy_percent=100 * level("busy_share"),
        clock_percent=100 * level("sm_hz") / _numbers([constants.get("max_sm_hz")]),
        power_percent=100 * level("power_w") / level("power_limit_w"),
    )


def _numbers(values: Iterable[Any]) -> npt.NDArray[np.float64]:
    return np.array([value if isinstance(value, (int, float)) else np.nan for value in values], dtype=float)


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
