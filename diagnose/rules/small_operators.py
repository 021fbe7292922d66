"""Hundreds of tiny operators: calling them takes longer than computing"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration, format_share
from diagnose.rules._compute import cost_share, model_ns, of_model
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_OPS = 150
"""A small model has fewer, and is small because its task is."""

MIN_SMALL_SHARE = 0.7
"""Part of the operations that must be too small to be worth a call."""

MAX_NS_PER_OP = 150_000
"""An eager operation takes 5 to 20 us on a CPU, forward, and two to three times that backward; more than
this, contention included, and it is not the call that takes the time."""

SAVED = (0.4, 0.9, 0.98)
"""What compiling, or one large operation in place of many small ones, saves of their time: compiled code
still has some calls, a batched operation hardly any."""


def graph_of(num_ops: int, elements: int = 1000) -> Graph:
    work = Work(num_ops=num_ops, flops=0.0, num_bytes=4.0 * elements * num_ops)
    return Graph(num_nodes=2 * num_ops, total=work, small_ops=work if elements < 16_000 else Work())


class SmallOperators(Rule):
    """
    ## What it means
    The model is hundreds of operations on a few thousand numbers each. Python and torch need some
    microseconds to call each of them, forward and backward, and the arithmetic takes less.

    ## What to do
    Compute the same in few operations: batch loops over samples, steps or heads into one tensor. Or let
    `torch.compile` fuse them.

    ## When it is wrong
    A sequence whose every step needs the one before, or a compiler that does not support the model. On a
    device the same shows as idleness between kernels: `launch-bound`.
    """

    needs = ("program.graph",)
    actions = ("regional-compile",)
    fires_on = (
        profile(step_ms=20, program=Program(graph=graph_of(400))),
        profile(step_ms=10, program=Program(graph=graph_of(200, elements=10_000))),
    )
    silent_on = (
        profile(step_ms=20, program=Program(graph=graph_of(60))),
        profile(step_ms=400, program=Program(graph=graph_of(400, elements=1_000_000))),
        profile(step_ms=400, program=Program(graph=graph_of(400))),
        profile(step_ms=20, device="cuda", program=Program(graph=graph_of(400))),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return profile.run.device == "cpu"

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        graph = profile.program.graph
        assert graph is not None
        small, total = graph.small_ops, graph.total
        passes_ns = model_ns(profile)
        if small.num_ops < MIN_OPS or small.num_ops < MIN_SMALL_SHARE * total.num_ops:
            return None
        share = cost_share(small, graph)
        per_op_ns = share * passes_ns / small.num_ops
        if per_op_ns > MAX_NS_PER_OP:
            return None
        low, _, high = (part * share * passes_ns for part in SAVED)
        return Finding(
            rule=self.name,
            summary=f"{small.num_ops} tiny operators make up the model.",
            lost_ns=of_model(profile, SAVED[1] * share),
            low_ns=low,
            high_ns=high,
            assumption="the same is computed in few large operators, or compiled",
            evidence=(
                f"{small.num_ops} of {total.num_ops} operators have results of a few thousand numbers.",
                f"They take {format_duration(per_op_ns)} each, forward and backward: about what"
                f" calling them"
                " costs.",
                f"Forward and backward are {format_share(passes_ns / profile.step_time_ns)} of the step.",
            ),
            fix="Replace loops over small tensors by one operation on a large one, or compile the model.",
            code="model = torch.compile(model)",
            actions=self.actions,
        )
