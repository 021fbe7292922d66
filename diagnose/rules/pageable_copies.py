"""Batches are copied to the device from memory that is not pinned"""

from __future__ import annotations

from diagnose.core.copies import Copies
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import profile
from diagnose.rules._loader_calls import applicable, with_loader_arguments
from diagnose.rules._supply import (
    main_loader,
)

MIN_SHARE = 0.04
"""Of the step, in which the device waits for a copy."""

PAGEABLE = 0.5
"""Part of the bytes that come from ordinary memory: the driver copies those twice, and the call waits."""

PINNED_SPEEDUP = 2.0
"""A copy from page-locked memory takes half the time on PCIe, as a rule of thumb; it can overlap, too."""


def sending(ms: float, num_bytes: float, pageable: float) -> Profile:
    """A loop that waits so long of 100 ms for so many bytes, this part of them from unpinned memory."""
    copies = Copies(to_device_ns=ms * 1e6, to_device_bytes=num_bytes, pageable_share=pageable)
    return profile(device="cuda", copy_ms=ms, copies=copies)


class PageableCopies(DeviceRule):
    """
    ## What it means
    Batches lie in ordinary memory. The driver has to copy them to page-locked memory first, piece by
    piece, and the call returns when that is done: neither the loop nor the device does anything else
    meanwhile.

    ## What to do
    Set `pin_memory=True` on the loader and copy with `non_blocking=True`.

    ## When it is wrong
    A machine with little memory: pinned memory cannot be swapped out.
    """

    needs = ("copies.to_device_ns", "copies.to_device_bytes", "copies.pageable_share")
    actions = ("pin-memory", "device-prefetch")
    explains = ("saturated-link",)
    fires_on = (sending(20, 200e6, 1.0),)
    silent_on = (sending(20, 200e6, 0.0), sending(1, 5e6, 1.0))

    def check(self, profile: Profile) -> Finding | None:
        copies = profile.copies
        spent_ns, pageable, sent = copies.to_device_ns, copies.pageable_share, copies.to_device_bytes
        assert spent_ns is not None and pageable is not None and sent is not None
        spent_ns = min(spent_ns, profile.spent_ns(Phase.COPY))
        if pageable < PAGEABLE or spent_ns < MIN_SHARE * profile.step_time_ns:
            return None
        loader = main_loader(profile)
        lost_ns = spent_ns * pageable
        return Finding(
            rule=self.name,
            summary="Copying batches from unpinned memory takes"
            f" {format_share(spent_ns / profile.step_time_ns)} of each step.",
            lost_ns={Phase.COPY: lost_ns},
            low_ns=lost_ns * (1 - 1 / PINNED_SPEEDUP),
            high_ns=lost_ns,
            assumption="pinned batches are copied while the device computes on the one before",
            evidence=(
                f"{format_bytes(sent)} are sent per step, {format_share(pageable)} of them from unpinned"
                " memory.",
                f"The device waits {format_ms(spent_ns)} of each step for them.",
            ),
            fix="Set pin_memory=True on the DataLoader and copy with non_blocking=True.",
            code=with_loader_arguments(profile, loader, pin_memory=True),
            file=loader.file if loader else "",
            line=loader.line if loader else 0,
            actions=applicable(self.actions, loader),
        )
