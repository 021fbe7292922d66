"""Rules of what only a run on an accelerator can have, and how a device's time becomes the loop's.

The ledger is the training thread's. On a device it launches kernels, runs ahead, and waits somewhere: in
the next copy, in `loss.item()`, in a full queue. What kernels take is thus lost in any phase that launches
or waits, and is divided among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.rules._phases import LOOP, shared
from diagnose.rules.base import Rule

UNFED = (Phase.DATA_WAIT, Phase.GC)
"""Phases in which it launches nothing, and whose idleness is a fault of their own."""

BUSY = 0.75
"""Part of the wall time in which kernels must run for their speed to set the pace: with much more idleness
it is what feeds the device, and faster kernels would only wait longer."""

ARITHMETIC, STREAMING = 0.7, 0.8
"""Parts of the highest rates of arithmetic and of memory that kernels of torch's libraries reach."""

ACCESSES = 2
"""How often a result is in the device's memory bus: written once, and read once."""


class DeviceRule(Rule):
    """A rule that does not apply to a run on the CPU."""

    def applies(self, profile: Profile) -> bool:
        return profile.run.device != "cpu"


def busy_ns(profile: Profile) -> float:
    """Returns the nanoseconds of a step in which kernels ran and the loop may have waited for them.

    0 where that was not measured.
    """
    there_ns = sum(profile.spent_ns(phase) for phase in LOOP)
    return min((profile.device.busy_share or 0.0) * profile.step_time_ns, there_ns)


def sets_the_pace(profile: Profile) -> bool:
    """Whether the loop is as fast as the device's kernels."""
    return profile.device.busy_share is not None and profile.device.busy_share >= BUSY


def kernel_share(profile: Profile, graph: Graph, work: Work) -> float | None:
    """Returns the part of the kernels' time that some products of the forward pass take, 0 to 1.

    From the measured share of all products where there is one, else from the rates that the device has for
    float32 and its memory. `None` without any.
    """
    device = profile.device
    if not graph.total.flops:
        return 0.0
    if device.matmul_share is not None:
        return device.matmul_share * work.flops / graph.total.flops
    if device.fp32_flops_per_s is None or device.bandwidth_bytes_per_s is None:
        return None
    arithmetic_s = graph.total.flops / (ARITHMETIC * device.fp32_flops_per_s)
    memory_s = ACCESSES * graph.total.num_bytes / (STREAMING * device.bandwidth_bytes_per_s)
    return arithmetic_s / (arithmetic_s + memory_s) * work.flops / graph.total.flops


def awaiting_launches(profile: Profile, phases: tuple[Phase, ...]) -> Mapping[Phase, float]:
    """Divides among phases the time of a step in which the device was idle for want of launches.

    A deep window tells it of recorded steps, whose host is slower: it is no more than what kernels and the
    phases that launch none leave of a usual step.
    """
    device = profile.device
    unfed_ns = sum(profile.spent_ns(phase) for phase in UNFED)
    rest_ns = profile.step_time_ns * (1 - (device.busy_share or 0.0)) - unfed_ns
    return shared(profile, max(0.0, min(device.launch_bound_ns or 0.0, rest_ns)), phases)


def computes_in(profile: Profile) -> str:
    """Returns the type of most of the products: autocast's, or most parameters'; empty if unknown."""
    if profile.device.autocast_dtype:
        return profile.device.autocast_dtype
    dtypes = profile.program.models[0].dtypes if profile.program.models else {}
    return max(dtypes, key=lambda dtype: dtypes[dtype], default="")
