"""A rank's readings of its device to what the rules know of it: driver, allocator, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from diagnose.analysis.retries import retry_ns
from diagnose.core.device import Device
from diagnose.core.ledger import COUNTS
from diagnose.store.reader import RankLog

MIN_READINGS = 3
"""Of the driver, which is read once a second: a share of the time from fewer is none."""

LOOKS_BACK_NS = 1_000_000_000
"""What the driver calls the share of the time in which kernels ran is of up to a second before."""

PER_CLOCK = 2
"""A core multiplies and adds in one clock, which counts as two; memory moves data at both its edges."""

HELD_DOWN = ("SwPowerCap", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "HwSlowdown")
"""What throttles: power and heat. An idle device, or clocks that somebody has set, are none of it."""

SETTINGS = ("name", "total_bytes", "tf32", "cudnn_tf32", "expandable_segments")

Figures = Mapping[str, Any]


def device_of(log: RankLog, warmup: int, supplied: Mapping[str, Any] | None = None) -> Device:
    """Composes what is known of a rank's device.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
        supplied: Fields of `Device` that others have measured, such as `idle_ns` of the device's own ledger
            or `tensor_core_share` of a deep window. They come before ours; `None` counts as not measured.
    """
    facts = log.meta.get("facts", {})
    identity: Figures = facts.get("device") or {}
    constants: Figures = facts.get("nvml") or {}
    capability = identity.get("capability")
    ours = {
        **{name: identity.get(name) for name in SETTINGS},
        "name": identity.get("name") or "",
        "capability": (int(capability[0]), int(capability[1])) if capability else None,
        "autocast_dtype": (facts.get("calls") or {}).get("autocast_dtype") if identity else None,
        **_rates(constants),
        **_driver(driver_readings(log, warmup), constants),
        **_shares(log, warmup),
        **_allocator(log, warmup),
    }
    known = {name: value for name, value in (supplied or {}).items() if value is not None}
    return Device(**{**ours, **known})


def driver_readings(log: RankLog, warmup: int) -> list[Figures]:
    """Returns what the driver said over the measured steps, in order."""
    rows: list[Mapping[str, Any]] = [
        readings for _, step, readings in log.training_vitals if step >= warmup
    ]
    return [row["device"] for row in rows if "device" in row]


def _rates(constants: Figures) -> dict[str, float]:
    """Highest rates, as data sheets reckon them; what a device reaches is less."""
    rates = {}
    if {"num_cores", "max_sm_hz"} <= constants.keys():
        rates["fp32_flops_per_s"] = PER_CLOCK * constants["num_cores"] * constants["max_sm_hz"]
    if {"memory_bus_bits", "max_memory_hz"} <= constants.keys():
        rates["bandwidth_bytes_per_s"] = (
            PER_CLOCK * constants["max_memory_hz"] * constants["memory_bus_bits"] / 8
        )
    return rates


def _driver(readings: Sequence[Figures], constants: Figures) -> dict[str, Any]:
    if len(readings) < MIN_READINGS:
        return {}
    others = [reading["other_processes"] for reading in readings if "other_processes" in reading]
    reasons = [set(reading["reasons"]) for reading in readings if "reasons" in reading]
    limits = [reading["power_limit_w"] for reading in readings if "power_limit_w" in reading]
    default_w = constants.get("default_power_limit_w")
    temperatures = [reading["temperature_c"] for reading in readings if "temperature_c" in reading]
    errors = [reading["uncorrected_errors"] for reading in readings if "uncorrected_errors" in reading]
    return {
        "clock_share": _clock_share(readings, constants),
        "throttle_share": _part(reasons, HELD_DOWN) if len(reasons) >= MIN_READINGS else None,
        "throttle_reasons": (
            {name: share for name in HELD_DOWN if (share := _part(reasons, (name,)))}
            if len(reasons) >= MIN_READINGS
            else None
        ),
        "power_w": _mean(readings, "power_w"),
        "power_limit_share": min(limits) / default_w if limits and default_w else None,
        "temperature_c": max(temperatures, default=None),
        "uncorrected_errors": errors[-1] if errors else None,
        "other_processes": max(others, default=None),
        "other_sm_share": _mean(readings, "other_sm_share"),
    }


def _shares(log: RankLog, warmup: int) -> dict[str, float | None]:
    """Returns the part of the time in which kernels ran: anybody's, and ours where nobody else is there."""
    begun_ns = int(log.steps[max(0, warmup - 1), COUNTS.index("end_ns")]) if len(log.steps) else 0
    from_ns = begun_ns + LOOKS_BACK_NS
    readings = [each for each in driver_readings(log, warmup) if each.get("time_ns", from_ns) >= from_ns]
    if len(readings) < MIN_READINGS:
        return {}
    utilisation = _mean(readings, "busy_share")
    others = [reading["other_processes"] for reading in readings if "other_processes" in reading]
    ours = others and not max(others)
    return {"busy_share": utilisation if ours else None, "utilisation_share": utilisation}


def busy(readings: Sequence[Figures]) -> list[Figures]:
    """Returns the readings taken while kernels ran: an idle device saves power, at no cost to anybody."""
    return [reading for reading in readings if reading.get("busy_share")]


def _clock_share(readings: Sequence[Figures], constants: Figures) -> float | None:
    highest = constants.get("max_sm_hz")
    clocks = [reading["sm_hz"] for reading in busy(readings) if "sm_hz" in reading]
    return min(1.0, fmean(clocks) / highest) if highest and len(clocks) >= MIN_READINGS else None


def _part(reasons: Sequence[set[str]], names: Sequence[str]) -> float:
    return fmean(not found.isdisjoint(names) for found in reasons)


def _mean(readings: Sequence[Figures], name: str) -> float | None:
    values = [float(reading[name]) for reading in readings if name in reading]
    return fmean(values) if values else None


def _allocator(log: RankLog, warmup: int) -> dict[str, Any]:
    rows: list[Mapping[str, Any]] = [readings for _, _, readings in log.vitals]
    states = [row["allocator"] for row in rows if row.get("allocator")]
    if not states:
        return {}
    fullest = max(states, key=lambda state: state.get("reserved_bytes", 0))
    return {
        "peak_bytes": _highest(states, "peak_allocated_bytes", "allocated_bytes"),
        "reserved_bytes": _highest(states, "peak_reserved_bytes", "reserved_bytes"),
        "allocated_bytes": fullest.get("allocated_bytes"),
        "inactive_split_bytes": fullest.get("inactive_split_bytes"),
        "alloc_retries": _counted(states, "retries"),
        "out_of_memory": _counted(states, "ooms"),
        "retry_ns": retry_ns(log, warmup),
    }


def _highest(states: Sequence[Figures], *names: str) -> int | None:
    return max((state[name] for state in states for name in names if name in state), default=None)


def _counted(states: Sequence[Figures], name: str) -> int | None:
    """A total over the run, also where the script has set the count back to 0 in between."""
    counts = [int(state[name]) for state in states if name in state]
    if not counts:
        return None
    before = [0, *counts[:-1]]
    return sum(now - then if now >= then else now for then, now in zip(before, counts, strict=True))
