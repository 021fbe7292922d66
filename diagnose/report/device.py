"""What the device's driver and torch's allocator said of it, and what was copied."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.copies import Copies
from diagnose.core.device import Device
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_share
from diagnose.report.base import Block, Fact, Facts, Section


class DeviceReadings(Section):
    """The readings of the accelerator, over the measured steps; what was not measured is left out."""

    order = 55
    title = "Device"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        device, copies = profile.device, profile.copies
        items = [*_state(device), *_memory(device), *_link(copies), *_copied(copies)]
        if not items:
            return []
        name = [Fact(label="device", value=device.name)] if device.name else []
        return [Facts(items=(*name, *items))]


def _state(device: Device) -> list[Fact]:
    reasons = sorted((device.throttle_reasons or {}).items(), key=lambda each: -each[1])
    why = ", ".join(f"{name} {format_share(share)}" for name, share in reasons)
    shares = (
        ("kernels running", device.utilisation_share, "of the time, as the driver counts"),
        ("clock", device.clock_share, "of the highest, while kernels ran"),
        ("held down", device.throttle_share, f"of the time: {why}" if why else "of the time"),
        ("power limit", device.power_limit_share, "of the card's default"),
    )
    items = [
        Fact(label=label, value=format_share(share), detail=detail)
        for label, share, detail in shares
        if share is not None
    ]
    if device.power_w is not None:
        items.append(Fact(label="power", value=f"{device.power_w:.0f} W", detail="on average"))
    if device.temperature_c is not None:
        items.append(Fact(label="temperature", value=f"{device.temperature_c} °C", detail="at most"))
    if device.other_processes:
        share = device.other_sm_share
        busy = f"computing {format_share(share)} of the time" if share is not None else ""
        items.append(Fact(label="processes of others", value=f"{device.other_processes}", detail=busy))
    if device.uncorrected_errors:
        items.append(
            Fact(label="memory errors", value=f"{device.uncorrected_errors}", detail="uncorrected")
        )
    return items


def _memory(device: Device) -> list[Fact]:
    items = []
    of = f"of {format_bytes(device.total_bytes)}" if device.total_bytes is not None else ""
    if device.peak_bytes is not None:
        items.append(Fact(label="memory of tensors", value=format_bytes(device.peak_bytes), detail=of))
    if device.reserved_bytes is not None:
        items.append(Fact(label="reserved", value=format_bytes(device.reserved_bytes), detail="at most"))
    if device.alloc_retries:
        items.append(
            Fact(label="allocator retries", value=f"{device.alloc_retries:,}", detail="in the run")
        )
    if device.out_of_memory:
        items.append(Fact(label="out of memory", value=f"{device.out_of_memory:,}", detail="times"))
    return items


def _link(copies: Copies) -> list[Fact]:
    if copies.link_generation is None or copies.link_width is None:
        return []
    now = f"PCIe {copies.link_generation} x{copies.link_width}"
    most = f"of {copies.link_max_generation} x{copies.link_max_width}"
    return [Fact(label="link", value=now, detail=most if copies.link_max_width is not None else "")]


def _copied(copies: Copies) -> list[Fact]:
    items = []
    if copies.to_device_bytes:
        pageable = copies.pageable_share
        how = f", {format_share(pageable)} from unpinned memory" if pageable is not None else ""
        sent = format_bytes(copies.to_device_bytes)
        items.append(Fact(label="sent to it", value=sent, detail=f"per step{how}"))
    if copies.to_host_bytes:
        fetched = format_bytes(copies.to_host_bytes)
        items.append(Fact(label="fetched from it", value=fetched, detail="per step"))
    return items
