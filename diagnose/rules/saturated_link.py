"""The link to the device carries as much as it can"""

from __future__ import annotations

from diagnose.core.copies import Copies
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import profile
from diagnose.rules._loader_calls import applicable
from diagnose.rules._supply import (
    main_loader,
)

MIN_SHARE = 0.04
"""Of the step, in which the device waits for a copy."""

SATURATED = 0.75
"""Part of the link's limit that the rate reaches; protocol takes most of the rest."""


def sending(ms: float, num_bytes: float = 7e8, bytes_per_s: float = 22e9) -> Profile:
    """A loop that waits so long of 100 ms for so many bytes, over a link of 25 GB/s."""
    copies = Copies(
        to_device_ns=ms * 1e6,
        to_device_bytes=num_bytes,
        link_bytes_per_s=bytes_per_s,
        link_limit_bytes_per_s=25e9,
    )
    return profile(device="cuda", copy_ms=ms, copies=copies)


class SaturatedLink(DeviceRule):
    """
    ## What it means
    Batches are so large that sending them to the device takes longer than computing on them, and the link
    between host and device is at its limit.

    ## What to do
    Send less: uint8 images that are converted on the device, token ids instead of embeddings,
    augmentation on the device, bfloat16 instead of float32.

    ## When it is wrong
    A link that other devices share at the same time, or one that runs below its best: see
    `degraded-link`.
    """

    needs = ("copies.to_device_ns", "copies.link_bytes_per_s", "copies.link_limit_bytes_per_s")
    actions = ("device-prefetch",)
    fires_on = (sending(30),)
    silent_on = (sending(30, num_bytes=7e7, bytes_per_s=3e9), sending(1))

    def check(self, profile: Profile) -> Finding | None:
        copies = profile.copies
        spent_ns, rate, limit = copies.to_device_ns, copies.link_bytes_per_s, copies.link_limit_bytes_per_s
        assert spent_ns is not None and rate is not None and limit is not None
        lost_ns = min(spent_ns, profile.spent_ns(Phase.COPY))
        if lost_ns < MIN_SHARE * profile.step_time_ns or rate < SATURATED * limit:
            return None
        return Finding(
            rule=self.name,
            summary=f"The link to the device is full, and {format_share(lost_ns / profile.step_time_ns)} of"
            " each step is spent waiting for it.",
            lost_ns={Phase.COPY: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=lost_ns,
            assumption="batches become small enough to be sent while the device computes",
            evidence=(
                f"The link carried {format_bytes(rate)} a second at its busiest, of {format_bytes(limit)}.",
                f"The device waits {format_ms(lost_ns)} of each step for copies.",
            ),
            fix="Send smaller types and convert on the device, for example uint8 images.",
            actions=applicable(self.actions, main_loader(profile)),
        )
