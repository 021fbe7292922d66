"""Free memory of the device is in pieces that do not fit"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._device import DeviceRule, busy_ns
from diagnose.rules._examples import GIB, card, profile
from diagnose.rules._phases import shared
from diagnose.rules.allocator_retries import MIN_PER_STEP
from diagnose.rules.base import WORTH_SHARE

MIN_SPLIT_SHARE = 0.2
"""Part of the reserved memory in free pieces; a steady loop has a few hundredths."""

NEARLY_ALL = 0.85
"""Part of the device's memory that is reserved: below this the driver still has some, and pieces that do
not fit cost nothing."""

LOW = 0.6
"""Segments that can grow fit most sizes, not all."""


def retrying(**readings: object) -> Profile:
    """A device that asks its driver again and again, with so much in pieces or not."""
    return profile(device=card(alloc_retries=300, retry_ns=8e6, reserved_bytes=76 * GIB, **readings))


class MemoryFragmentation(DeviceRule):
    """
    ## What it means
    A good part of the device's memory is free, but in pieces between tensors, because sizes differ from
    batch to batch. Nothing large fits, so the allocator frees its blocks and asks the driver for others,
    again and again.

    ## What to do
    Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, which lets blocks grow, or pad batches to a few
    lengths.

    ## When it is wrong
    Memory that is really full: see `allocator-retries`. It reads the allocator's statistics and the time of
    its retries; no run on a GPU has tried it yet.
    """

    needs = (
        "device.alloc_retries",
        "device.retry_ns",
        "device.inactive_split_bytes",
        "device.reserved_bytes",
        "device.total_bytes",
    )
    explains = ("allocator-retries",)
    fires_on = (retrying(inactive_split_bytes=24 * GIB),)
    silent_on = (
        profile(device=card()),
        retrying(),
        profile(device=card(inactive_split_bytes=24 * GIB)),
        retrying(inactive_split_bytes=24 * GIB, expandable_segments=True),
    )

    def applies(self, profile: Profile) -> bool:
        return super().applies(profile) and not profile.device.expandable_segments

    def check(self, profile: Profile) -> Finding | None:
        device = profile.device
        split, reserved, total = device.inactive_split_bytes, device.reserved_bytes, device.total_bytes
        assert split is not None and reserved and total
        assert device.alloc_retries is not None and device.retry_ns is not None
        if split < MIN_SPLIT_SHARE * reserved or reserved < NEARLY_ALL * total:
            return None
        lost_ns = min(device.retry_ns, busy_ns(profile) or device.retry_ns)
        per_step = device.alloc_retries / max(1, profile.steps.looked_at)
        if per_step < MIN_PER_STEP or lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{format_share(split / reserved)} of the device's memory is free, and does not fit.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=lost_ns,
            assumption="blocks that can grow fit sizes that change",
            evidence=(
                f"{format_bytes(split)} of {format_bytes(reserved)} reserved are free pieces of larger"
                f" blocks; the device has {format_bytes(total)}.",
                f"{device.alloc_retries} retries in {profile.steps.looked_at} steps take"
                f" {format_ms(lost_ns)} of each.",
            ),
            fix="Set the variable in the environment of the script, before it starts.",
            code="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
