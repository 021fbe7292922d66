"""Batches are too small to fill the device"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._device import DeviceRule, busy_ns, sets_the_pace
from diagnose.rules._examples import GIB, card, profile
from diagnose.rules._phases import shared
from diagnose.rules._supply import main_loader

MAX_SM_SHARE = 0.6
"""Multiprocessors in use below which kernels are too small for the device: TensorBoard's plugin warns at
half, SageMaker at 70 % of utilisation."""

FULL = 0.85
"""A device that is full in practice: the last blocks of each kernel never fill it."""

MOST_MEMORY = 0.9
"""Part of the memory that a larger batch may take."""

LOW, HIGH = 0.3, 1.2
"""Kernels that are short of work for another reason than the batch, such as a short sequence, gain less."""

MIN_SHARE = 0.05


class SmallBatch(DeviceRule):
    """
    ## What it means
    A kernel is always running, but on a part of the multiprocessors only: there is not enough work in a
    batch. A larger one would take hardly longer, and memory for it is free.

    ## What to do
    Raise the batch size, and the learning rate with it; or keep the product of both by accumulating fewer
    micro-batches.

    ## When it is wrong
    Where the batch must stay small for the result's sake. It changes the training. It reads the busy share,
    the multiprocessors in use and the peak of memory; no run on a GPU has tried it yet.
    """

    needs = ("device.busy_share", "device.sm_share", "device.total_bytes", "device.peak_bytes")
    fires_on = (
        profile(device=card(sm_share=0.3, peak_bytes=10 * GIB)),
        profile(device=card(sm_share=0.55, peak_bytes=30 * GIB)),
    )
    silent_on = (
        profile(device=card()),
        profile(device=card(sm_share=0.3, peak_bytes=70 * GIB)),
        profile(device=card(sm_share=0.3, peak_bytes=10 * GIB, busy_share=0.4)),
        profile(device=card(peak_bytes=10 * GIB)),
    )

    def check(self, profile: Profile) -> Finding | None:
        device = profile.device
        filled, total, peak = device.sm_share, device.total_bytes, device.peak_bytes
        assert filled is not None and total is not None and peak is not None
        if not sets_the_pace(profile) or not 0 < filled <= MAX_SM_SHARE or not peak:
            return None
        # All of the peak is taken to grow with the batch; weights do not.
        growth = min(FULL / filled, MOST_MEMORY * total / peak)
        lost_ns = (1 - 1 / growth) * busy_ns(profile) if growth > 1 else 0.0
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        loader = main_loader(profile)
        size = loader.batch_size if loader else None
        return Finding(
            rule=self.name,
            summary=f"A batch fills {format_share(filled)} of the device.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, busy_ns(profile)),
            assumption=f"a batch {growth:.1f} times as large takes as long as one does now",
            evidence=(
                f"Kernels run {format_share(device.busy_share or 0.0)} of the time, on"
                f" {format_share(filled)} of the multiprocessors.",
                f"The peak of memory is {format_bytes(peak)} of {format_bytes(total)}.",
            ),
            fix=f"Raise the batch size{f' from {size} to {int(size * growth)}' if size else ''}.",
            file=loader.file if loader else "",
            line=loader.line if loader else 0,
        )
