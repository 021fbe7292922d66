"""The device waits for the host to launch its kernels"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._compute import to_compile
from diagnose.rules._device import DeviceRule, awaiting_launches
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import STEP

MIN_SHARE = 0.1
"""Every step has moments in which the device has finished and the next kernel is not there yet."""

MAX_NS_PER_KERNEL = 100_000
"""Launching takes an eager host 5 to 30 us a kernel. More, and the host does something else."""

LOW, EXPECTED, HIGH = 0.4, 0.8, 1.0
"""CUDA graphs leave hardly any of it; compiling alone launches fewer kernels, but still launches."""


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
    A host that is slow for another reason: no free CPU, or synchronising in every layer. It reads, from a
    deep window, how long the device was idle while the host was inside an operation, at most what usual
    steps leave, and the number of kernels; no run on a GPU has tried it yet. Its counterpart on a CPU is
    `small-operators`.
    """

    needs = ("device.launch_bound_ns", "device.num_kernels")
    actions = ("regional-compile", "fused-optimizer")
    fires_on = (
        profile(device=card(busy_share=0.5, launch_bound_ns=45e6, num_kernels=3000.0)),
        profile(step_ms=8, device=card(busy_share=0.8, launch_bound_ns=1.5e6, num_kernels=400.0)),
    )
    silent_on = (
        profile(device=card()),
        profile(device=card(busy_share=0.5, launch_bound_ns=45e6), data_wait_ms=50),
        profile(device=card(busy_share=0.5, launch_bound_ns=45e6, num_kernels=100.0)),
    )

    def check(self, profile: Profile) -> Finding | None:
        device = profile.device
        assert device.launch_bound_ns is not None and device.num_kernels is not None
        # All that the host does there is launch: in other phases idleness has other causes and rules.
        idle = awaiting_launches(profile, STEP)
        idle_ns = sum(idle.values())
        launching_ns = sum(profile.spent_ns(phase) for phase in STEP)
        if idle_ns < MIN_SHARE * profile.step_time_ns:
            return None
        per_kernel_ns = launching_ns / max(1.0, device.num_kernels)
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
            lost_ns={phase: EXPECTED * ns for phase, ns in idle.items() if ns},
            low_ns=LOW * idle_ns,
            high_ns=HIGH * idle_ns,
            assumption="launches are recorded once and replayed",
            evidence=(
                f"No kernel runs for {format_ms(idle_ns)} of each step while the host is inside an"
                " operation and waits for nothing.",
                f"{device.num_kernels:,.0f} kernels a step leave {format_duration(per_kernel_ns)} for each:"
                " what launching takes.",
            ),
            fix=fix,
            code=code,
            actions=self.actions,
        )
