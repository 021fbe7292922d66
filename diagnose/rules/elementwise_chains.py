"""Chains of elementwise operations go through the device's memory one by one"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._compute import to_compile
from diagnose.rules._device import ACCESSES, STREAMING, DeviceRule, busy_ns, sets_the_pace
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import shared

MIN_OPS = 8
"""Fewer operations can be fused by hand, and hardly take time."""

PASSES = 2
"""A result between two operations is written and read in the forward, and its gradient in the backward."""

LOW, HIGH = 0.5, 1.3
"""Small results stay in the cache between two kernels; masks and saved copies come on top."""

MIN_SHARE = 0.03


def chained(num_bytes: float, num_ops: int = 60) -> Program:
    graph = Graph(
        num_nodes=400,
        total=Work(num_ops=200, flops=1e12, num_bytes=4 * num_bytes),
        pointwise=Work(num_ops=num_ops, num_bytes=num_bytes),
    )
    return Program(graph=graph)


class ElementwiseChains(DeviceRule):
    """
    ## What it means
    The model adds, multiplies and activates in separate operations. Each reads its operands from the
    device's memory and writes its result there, for the next to read again: the memory is busy, not the
    arithmetic.

    ## What to do
    Compile the function with `torch.compile`, which makes one kernel of a chain, or use a fused operation
    (`F.gelu`, `F.layer_norm`, `F.silu`) in place of a formula.

    ## When it is wrong
    Results that stay in the device's cache cost less. It reads the graph, and the device's bandwidth and
    busy share; no run on a GPU has tried it yet.
    """

    needs = ("program.graph", "device.busy_share", "device.bandwidth_bytes_per_s")
    actions = ("regional-compile",)
    fires_on = (
        profile(device=card(), program=chained(5e9)),
        profile(device=card(bandwidth_bytes_per_s=0.3e12), program=chained(1e9)),
    )
    silent_on = (
        profile(device=card(), program=chained(0.2e9)),
        profile(device=card(busy_share=0.3), program=chained(5e9)),
        profile(device=card(), program=chained(5e9, num_ops=3)),
    )

    def check(self, profile: Profile) -> Finding | None:
        graph, rate = profile.program.graph, profile.device.bandwidth_bytes_per_s
        assert graph is not None and rate is not None
        if graph.pointwise.num_ops < MIN_OPS or not sets_the_pace(profile):
            return None
        moved_bytes = PASSES * ACCESSES * graph.pointwise.num_bytes
        lost_ns = min(1e9 * moved_bytes / (STREAMING * rate), 0.7 * busy_ns(profile))
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        fix, code = to_compile(
            profile,
            "Compile the layers that hold them, or the whole model.",
            "model = torch.compile(model)",
        )
        return Finding(
            rule=self.name,
            summary=f"{graph.pointwise.num_ops} elementwise operations could be part of the next one.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, busy_ns(profile)),
            assumption="what lies between two elementwise operations never reaches the memory",
            evidence=(
                f"{graph.pointwise.num_ops} elementwise operations have another one as their only user;"
                f" their results are {format_bytes(graph.pointwise.num_bytes)}.",
                f"Writing and reading these, and their gradients, takes {format_ms(lost_ns)} at"
                f" {format_bytes(rate)} a second.",
                f"Kernels run {format_share(profile.device.busy_share or 0.0)} of the time.",
            ),
            fix=fix,
            code=code,
            actions=self.actions,
        )
