"""The device waits for the host to launch its kernels"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._compute import to_compile
from diagnose.rules._device import UNFED, DeviceRule, awaiting_launches
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import STEP

MIN_SHARE = 0.1
"""Every step has moments in which the device has finished and the next kernel is not there yet."""

MAX_NS_PER_KERNEL = 100_000
"""Launching takes an eager host 5 to 30 us a kernel. More, and the host does something else."""

NO_KERNELS = (*UNFED, Phase.COPY)
"""Phases in which the driver sees no kernel, whatever the device does: to it a copy is none."""

KERNELS_PER_OP = 3
"""At least: one in the forward pass, and one for each of two inputs, or for clipping and the optimizer."""

LOW, EXPECTED, HIGH = 0.4, 0.8, 1.0
"""CUDA graphs leave hardly any of it; compiling alone launches fewer kernels, but still launches."""


TRACED = ("device.launch_bound_ns", "device.num_kernels")
"""What a deep window tells."""

HEARD = ("device.utilisation_share", "device.idle_at_most_ns", "program.graph")
"""What the driver, the device's events and the graph tell of any run, less exactly. While the driver sees
no kernel of anybody, there is none of ours, so it need not know whose they are, as in a container."""


def by_events(
    num_ops: int, idle_ms: Mapping[Phase, float], busy_share: float = 0.5, **parts: Any
) -> Profile:
    """Returns a profile without a deep window, whose forward pass is of so many operations."""
    heard = {phase: ms * 1e6 for phase, ms in idle_ms.items()}
    return profile(
        device=card(
            utilisation_share=busy_share, launch_bound_ns=None, num_kernels=None, idle_at_most_ns=heard
        ),
        program=Program(graph=Graph(num_nodes=2 * num_ops, total=Work(num_ops=num_ops))),
        **parts,
    )


ALWAYS_DRY = {Phase.FORWARD: 29.0, Phase.BACKWARD: 53.0, Phase.OPTIMIZER: 9.0, Phase.OTHER: 4.0}
BEHIND = {Phase.FORWARD: 2.0, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 0.1, Phase.OTHER: 4.0}
DRY_BESIDE = {Phase.FORWARD: 6.0, Phase.BACKWARD: 2.0, Phase.OTHER: 58.0}
LAUNCHED_ANEW = {Phase.FORWARD: 15.0, Phase.BACKWARD: 10.0, Phase.OTHER: 4.0}


@dataclass(frozen=True, slots=True)
class Idle:
    """Nanoseconds per step in which the device waits for launches.

    Attributes:
        by_phase: As expected, by phase.
        least: Of all phases together.
        most: Likewise.
        num_kernels: Kernels launched per step, at least.
        evidence: A sentence on how that is known, and one on the kernels, without its end.
    """

    by_phase: Mapping[Phase, float]
    least: float
    most: float
    num_kernels: float
    evidence: tuple[str, str]


class LaunchBound(DeviceRule):
    """
    ## What it means
    The device finishes each kernel before the host has launched the next one. The host is the bottleneck in
    the forward pass, the backward pass and the optimizer: many small kernels, launched one by one from
    Python.

    ## What to do
    Compile with `mode="reduce-overhead"`, which replays all launches as one CUDA graph; give the optimizer
    `fused=True`; or make batches larger, so that each kernel lasts longer.

    ## When it is wrong
    A host that is slow for another reason: no free CPU, or synchronising in every layer. Where there is a
    deep window, it reads from that how long the device was idle while the host was inside an operation, at
    most what usual steps leave, and the number of kernels. Without one it takes the time in which the
    driver saw no kernel of anybody, as far as the device was not behind the host then, and guesses the
    kernels from the operations of the forward pass; of a compiled model none are seen, and it is silent. No
    run on a GPU has tried it yet. Its counterpart on a CPU is `small-operators`.
    """

    needs = TRACED
    actions = ("regional-compile", "fused-optimizer")
    fires_on = (
        profile(device=card(busy_share=0.5, launch_bound_ns=45e6, num_kernels=3000.0)),
        profile(step_ms=8, device=card(busy_share=0.8, launch_bound_ns=1.5e6, num_kernels=400.0)),
        by_events(600, ALWAYS_DRY),
        by_events(600, ALWAYS_DRY, busy_share=0.8),
    )
    silent_on = (
        profile(device=card()),
        profile(device=card(busy_share=0.5, launch_bound_ns=45e6), data_wait_ms=50),
        profile(device=card(busy_share=0.5, launch_bound_ns=45e6, num_kernels=100.0)),
        by_events(600, ALWAYS_DRY, busy_share=0.95),
        by_events(600, BEHIND),
        by_events(600, DRY_BESIDE, busy_share=0.4, other_ms=60),
        by_events(600, ALWAYS_DRY, data_wait_ms=50),
        by_events(60, ALWAYS_DRY),
        by_events(600, LAUNCHED_ANEW, busy_share=0.7, copy_ms=25),
    )

    def needed(self, profile: Profile) -> tuple[str, ...]:
        device, graph = profile.device, profile.program.graph
        traced = None not in (device.launch_bound_ns, device.num_kernels)
        heard = None not in (device.utilisation_share, device.idle_at_most_ns, graph)
        return HEARD if heard and not traced else TRACED

    def check(self, profile: Profile) -> Finding | None:
        # All that the host does there is launch: in other phases idleness has other causes and rules.
        idle = self._traced(profile) if self.needed(profile) == TRACED else self._heard(profile)
        idle_ns = sum(idle.by_phase.values())
        launching_ns = sum(profile.spent_ns(phase) for phase in STEP)
        if idle_ns < MIN_SHARE * profile.step_time_ns:
            return None
        per_kernel_ns = launching_ns / max(1.0, idle.num_kernels)
        if per_kernel_ns > MAX_NS_PER_KERNEL:
            return None
        fix, code = to_compile(
            profile,
            "Compile the model for CUDA graphs.",
            'model = torch.compile(model, mode="reduce-overhead")',
        )
        return Finding(
            rule=self.name,
            summary=f"The device waits {format_share(idle_ns / profile.step_time_ns)} of each step for"
            " kernels to be launched.",
            lost_ns={phase: EXPECTED * ns for phase, ns in idle.by_phase.items() if ns},
            low_ns=LOW * idle.least,
            high_ns=HIGH * idle.most,
            assumption="launches are recorded once and replayed",
            evidence=(
                idle.evidence[0],
                f"{idle.evidence[1]} {format_duration(per_kernel_ns)} for each: what launching takes.",
            ),
            fix=fix,
            code=code,
            actions=self.actions,
        )

    def _traced(self, profile: Profile) -> Idle:
        num_kernels = profile.device.num_kernels
        assert num_kernels is not None
        idle = awaiting_launches(profile, STEP)
        idle_ns = sum(idle.values())
        return Idle(
            by_phase=idle,
            least=idle_ns,
            most=idle_ns,
            num_kernels=num_kernels,
            evidence=(
                f"No kernel runs for {format_ms(idle_ns)} of each step while the host is inside an"
                " operation and waits for nothing.",
                f"{num_kernels:,.0f} kernels a step leave",
            ),
        )

    def _heard(self, profile: Profile) -> Idle:
        """The driver tells how long the device was idle, its events where it can have been."""
        device, graph = profile.device, profile.program.graph
        assert device.idle_at_most_ns is not None and graph is not None
        assert device.utilisation_share is not None
        none_ns = sum(profile.spent_ns(phase) for phase in NO_KERNELS)
        rest_ns = max(0.0, profile.step_time_ns * (1 - device.utilisation_share) - none_ns)
        at_most = {phase: device.idle_at_most_ns.get(phase, 0.0) for phase in STEP}
        most_ns = sum(at_most.values())
        named = (*STEP, *NO_KERNELS)
        beside_ns = sum(ns for phase, ns in device.idle_at_most_ns.items() if phase not in named)
        part = min(1.0, rest_ns / max(1.0, most_ns + beside_ns))
        num_kernels = KERNELS_PER_OP * graph.total.num_ops * profile.steps.passes
        return Idle(
            by_phase={phase: part * ns for phase, ns in at_most.items()},
            least=max(0.0, part * (most_ns + beside_ns) - beside_ns),
            most=min(rest_ns, most_ns),
            num_kernels=num_kernels,
            evidence=(
                f"The driver sees no kernel for {format_ms(rest_ns)} of each step besides waits for data"
                f" and copies, and for up to {format_ms(most_ns)} of forward, backward and optimizer the"
                " device is not behind the host.",
                f"{graph.total.num_ops:,} operations forward, so {num_kernels:,.0f} kernels or more,"
                " leave at most",
            ),
        )
