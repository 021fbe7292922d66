"""Running totals of the operating system, and readings of the device, to rates and levels over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.history import Readings
from diagnose.core.units import NS_PER_S
from diagnose.store.reader import RankLog

MAX_POINTS = 600

MAX_DRAWN = 240
"""Readings that are drawn: more would neither be seen nor sent in time."""

MIN_ELAPSED_S = 0.1
"""Sooner after each other readings tell no rate: the system counts what all programs use in 10 ms."""

Vector = npt.NDArray[np.float64]


def _none() -> Vector:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceLane:
    """Readings of the device's driver over time, 0 to 100; NaN where one was not measured.

    Attributes:
        time_s: Seconds from the end of the run's first step.
        busy_percent: Part of the time in which any kernel ran, of anybody's.
        clock_percent: The cores' clock, of their highest.
        power_percent: Power, of the limit that is set.
    """

    time_s: Vector = field(default_factory=_none)
    busy_percent: Vector = field(default_factory=_none)
    clock_percent: Vector = field(default_factory=_none)
    power_percent: Vector = field(default_factory=_none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vitals:
    """Readings of the operating system over time; NaN where one was not measured.

    Attributes:
        time_s: Seconds from the end of the run's first step.
        step: Steps that had finished.
        resident_bytes: Memory of the training process.
        swapped_bytes: Likewise what is swapped out.
        process_cpus: CPUs that it used since the reading before.
        child_cpus: CPUs that its children used, such as DataLoader workers.
        busy_cpus: CPUs of the machine in use by anybody.
        allocated_bytes: Memory of the device that tensors held.
        reserved_bytes: Likewise what torch's allocator had taken from the driver.
        device: What the device's driver says; `None` without one.
    """

    time_s: Vector = field(default_factory=_none)
    step: Vector = field(default_factory=_none)
    resident_bytes: Vector = field(default_factory=_none)
    swapped_bytes: Vector = field(default_factory=_none)
    process_cpus: Vector = field(default_factory=_none)
    child_cpus: Vector = field(default_factory=_none)
    busy_cpus: Vector = field(default_factory=_none)
    allocated_bytes: Vector = field(default_factory=_none)
    reserved_bytes: Vector = field(default_factory=_none)
    device: DeviceLane | None = None


def memory_of(vitals: Vitals) -> tuple[Vector, dict[str, Vector]]:
    """Returns memory in bytes over the seconds, by the name of whose it is, few enough to be drawn."""
    return _thinned(
        vitals.time_s,
        {
            "resident": vitals.resident_bytes,
            "device, in tensors": vitals.allocated_bytes,
            "device, reserved": vitals.reserved_bytes,
        },
    )


def cpus_of(vitals: Vitals) -> tuple[Vector, dict[str, Vector]]:
    """Returns CPUs in use, likewise."""
    return _thinned(
        vitals.time_s,
        {
            "training process": vitals.process_cpus,
            "its workers": vitals.child_cpus,
            "all programs": vitals.busy_cpus,
        },
    )


def device_lane(vitals: Vitals) -> tuple[Vector, dict[str, Vector]]:
    """Returns what the device's driver says in percent, likewise."""
    lane = vitals.device or DeviceLane()
    return _thinned(
        lane.time_s,
        {
            "kernels running": lane.busy_percent,
            "clock": lane.clock_percent,
            "power": lane.power_percent,
        },
    )


def readings_of(log: RankLog) -> dict[str, Readings]:
    """Returns a run's readings for charts, by the names of the fields of `core.history.History`."""
    if not len(log.steps):
        return {}
    facts = _dict(log.meta.get("facts"))
    vitals = vitals_of(log.vitals, int(log.steps[0, 0]), _dict(facts.get("nvml")))
    found = {
        "memory_bytes": memory_of(vitals),
        "cpus": cpus_of(vitals),
        "device_percent": device_lane(vitals),
    }
    return {
        name: Readings(
            seconds=tuple(seconds.tolist()),
            values={
                whose: tuple(values.tolist())
                for whose, values in lines.items()
                if np.isfinite(values).any()
            },
        )
        for name, (seconds, lines) in found.items()
    }


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
        np.divide(np.diff(level(name)), elapsed_s, out=rates[1:], where=elapsed_s >= MIN_ELAPSED_S)
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


def _thinned(seconds: Vector, lines: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
    """Returns means of so many neighbours that few enough points remain; NaN where none was measured."""
    width = -(-len(seconds) // MAX_DRAWN)
    if width <= 1:
        return seconds, dict(lines)
    firsts = np.arange(0, len(seconds), width)
    means = {}
    for name, values in lines.items():
        known = np.isfinite(values)
        counts = np.add.reduceat(known.astype(float), firsts)
        sums = np.add.reduceat(np.where(known, values, 0.0), firsts)
        means[name] = np.divide(sums, counts, out=np.full(len(firsts), np.nan), where=counts > 0)
    return seconds[firsts], means
