"""The allocator runs out of memory, gives it back and asks again"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import GIB, card, profile
from diagnose.rules._phases import shared
from diagnose.rules.base import WORTH_SHARE

MIN_PER_STEP = 0.01
"""Once in a hundred steps: a few retries at the start, before sizes have settled, cost nothing after."""

LOW = 0.5
"""Some allocations remain, also where memory is ample."""


class AllocatorRetries(DeviceRule):
    """
    ## What it means
    The device's memory is full. Torch's allocator frees what it kept for reuse, which waits for all kernels
    to end, and asks the driver for new blocks, in step after step.

    ## What to do
    Make room: a smaller micro-batch with accumulation, checkpointing of some layers, or a leaner optimizer.

    ## When it is wrong
    Sizes that change from batch to batch fill the memory with pieces that do not fit: see
    `memory-fragmentation`. It reads the allocator's count of retries; what they cost shows in how much
    longer steps with them are, so in a run that has them all the time it is not known. No run on a GPU has
    tried it yet.
    """

    needs = ("device.alloc_retries", "device.retry_ns")
    actions = ("activation-checkpointing", "micro-batching", "eight-bit-states")
    fires_on = (
        profile(device=card(alloc_retries=400, retry_ns=12e6, peak_bytes=79 * GIB)),
        profile(device=card(alloc_retries=20, retry_ns=3e6, peak_bytes=79 * GIB)),
    )
    silent_on = (
        profile(device=card()),
        profile(device=card(alloc_retries=3, retry_ns=3e6)),
        profile(device=card(alloc_retries=400, retry_ns=0.5e6)),
    )

    def check(self, profile: Profile) -> Finding | None:
        device = profile.device
        assert device.alloc_retries is not None and device.retry_ns is not None
        lost_ns = min(device.retry_ns, sum(profile.spent_ns(p) for p in (Phase.FORWARD, Phase.BACKWARD)))
        per_step = device.alloc_retries / max(1, profile.steps.looked_at)
        if per_step < MIN_PER_STEP or lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        evidence = [
            f"{device.alloc_retries} retries in {profile.steps.looked_at} steps; they take"
            f" {format_ms(lost_ns)} of each."
        ]
        if device.peak_bytes is not None and device.total_bytes is not None:
            evidence.append(
                f"Tensors took up to {format_bytes(device.peak_bytes)} of"
                f" {format_bytes(device.total_bytes)}."
            )
        return Finding(
            rule=self.name,
            summary=f"Getting memory from the driver again takes {format_ms(lost_ns)} of each step.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=lost_ns,
            assumption="with enough memory the allocator never asks the driver after the first steps",
            evidence=tuple(evidence),
            fix="Halve the micro-batch and accumulate two of them, or checkpoint some layers.",
            actions=self.actions,
        )
