"""What a rank's loop copies between host and device, from its own calls and from the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diagnose.analysis.device import MIN_READINGS, busy, driver_readings
from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.core.copies import Copies
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.store.reader import RankLog

MIN_STEPS = 5
"""Steps whose copies were looked at: fewer may not be like the others."""

SLOWEST_BYTES_PER_S = 0.5e9
CALL_NS = 100_000
"""A copy takes no longer than this: half of what the slowest links in use carry, and what a call takes.
Beyond that the device did something else between the two events: other programs' work."""

LANE_BYTES_PER_S = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1_969e6, 5: 3_938e6, 6: 7_563e6, 7: 15_125e6}
"""What a lane of each PCIe generation carries in one direction, its encoding taken off."""

Sites = Sequence[Mapping[str, Any]]


def copies_of(log: RankLog, warmup: int) -> Copies:
    """Composes what is known of a rank's copies.

    The time in which the device copied and computed nothing is told by its own clock alone: on the host's a
    copy also waits for all kernels before it.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
    """
    facts: Mapping[str, Any] = log.meta.get("facts", {})
    looked: Mapping[str, Any] = facts.get("copies") or {}
    figures: dict[str, Any] = {}
    steps = int(looked.get("num_steps", 0))
    if facts.get("device") and steps >= MIN_STEPS:
        sites = looked.get("sites", ())
        sent = [site for site in sites if site["kind"] == "sent"]
        fetched = [site for site in sites if site["kind"] == "fetched"]
        figures |= _sent(sent, steps, _to_device_ns(log, warmup, sent, fetched, steps))
        figures |= _fetched(fetched, steps)
    return Copies(**figures, **_link(driver_readings(log, warmup), facts.get("nvml") or {}))


def _to_device_ns(log: RankLog, warmup: int, sent: Sites, fetched: Sites, steps: int) -> float | None:
    """Divides what the device's clock charges to `copy` by bytes: both directions are about as fast."""
    rows = log.steps[warmup:]
    if not log.meta.get(BY_DEVICE) or not len(rows):
        return None
    charged = _sum(sent, "bytes")
    both = charged + _sum(fetched, "charged_bytes")
    took_ns = float(rows[:, COLUMNS.index(Phase.COPY.value)].mean()) * (charged / both if both else 0.0)
    return min(took_ns, (charged / SLOWEST_BYTES_PER_S * 1e9 + _sum(sent, "calls") * CALL_NS) / steps)


def _sent(sites: Sites, steps: int, to_device_ns: float | None) -> dict[str, Any]:
    total, constant = _sum(sites, "bytes"), _sum(sites, "constant_bytes")
    call_ns = _sum(sites, "ns")
    constant_ns = to_device_ns * _sum(sites, "constant_ns") / call_ns if to_device_ns and call_ns else None
    file, line = _place(sites, "constant_bytes")
    return {
        "to_device_ns": to_device_ns,
        "to_device_bytes": total / steps,
        "pageable_share": _sum(sites, "pageable_bytes") / total if total else 0.0,
        "constant_bytes": constant / steps,
        "constant_ns": constant_ns if constant else 0.0,
        "constant_file": file,
        "constant_line": line,
    }


def _fetched(sites: Sites, steps: int) -> dict[str, Any]:
    file, line = _place(sites, "bytes")
    return {
        "to_host_bytes": _sum(sites, "bytes") / steps,
        "to_host_ns": _sum(sites, "ns") / steps,
        "to_host_file": file,
        "to_host_line": line,
    }


def _sum(sites: Sites, name: str) -> float:
    return float(sum(site[name] for site in sites))


def _place(sites: Sites, name: str) -> tuple[str, int]:
    """Returns the place with most of something; no file where there is nothing, or no user's line."""
    most = max(sites, key=lambda site: site[name], default=None)
    return (most["file"], most["line"]) if most is not None and most[name] and most["file"] else ("", 0)


def _link(readings: Sequence[Mapping[str, Any]], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the link while kernels ran: an idle device lets it fall back to a lower generation."""
    loaded = [reading for reading in busy(readings) if "pcie_generation" in reading]
    rates = [reading["to_device_bytes_per_s"] for reading in readings if "to_device_bytes_per_s" in reading]
    figures: dict[str, Any] = {
        "link_bytes_per_s": max(rates, default=None),
        "link_max_generation": constants.get("max_pcie_generation"),
        "link_max_width": constants.get("max_pcie_width"),
    }
    if len(loaded) >= MIN_READINGS and all("pcie_width" in reading for reading in loaded):
        generation = max(reading["pcie_generation"] for reading in loaded)
        width = max(reading["pcie_width"] for reading in loaded)
        figures |= {
            "link_generation": generation,
            "link_width": width,
            "link_limit_bytes_per_s": LANE_BYTES_PER_S[generation] * width
            if generation in LANE_BYTES_PER_S
            else None,
        }
    return figures
