"""Divides the time of forward and backward among the operations of a graph."""

from __future__ import annotations

from collections.abc import Mapping

from diagnose.core.graph import Dropped, Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile

DISPATCH_NS = 3000.0
FLOPS_PER_NS = 50.0
BYTES_PER_NS = 5.0
"""An operation's fixed cost, and the speed of one core at products and at memory. Only the shares that they
give are used, and on any machine these three stand in about this relation."""


def cost_ns(work: Work) -> float:
    """Returns about how long operations take on one core: good for shares of a whole only."""
    return work.num_ops * DISPATCH_NS + work.flops / FLOPS_PER_NS + work.num_bytes / BYTES_PER_NS


def cost_share(work: Work, graph: Graph | Dropped) -> float:
    """Returns the part of the graph's time that some of its operations take, 0 to 1."""
    whole = cost_ns(graph.total)
    return min(1.0, cost_ns(work) / whole) if whole else 0.0


def shares_of(work: Work, graph: Graph | Dropped) -> dict[Phase, float]:
    """Returns the part of forward and of backward that some operations take, each 0 to 1.

    Measured, where a clock was on the nodes of the backward pass; else estimated by sizes.
    """
    parts = {Phase.FORWARD: "forward_ns", Phase.BACKWARD: "backward_ns"}
    shares: dict[Phase, float] = {}
    for phase, name in parts.items():
        whole, part = getattr(graph.total, name), getattr(work, name)
        shares[phase] = min(1.0, part / whole) if whole and part is not None else cost_share(work, graph)
    return shares


def of_work(profile: Profile, work: Work, graph: Graph) -> dict[Phase, float]:
    """Returns nanoseconds of each step, by phase, that some operations take."""
    return {phase: share * profile.spent_ns(phase) for phase, share in shares_of(work, graph).items()}


def to_compile(profile: Profile, fix: str, code: str) -> tuple[str, str]:
    """Returns advice to compile, and its line; none where a gradient is differentiated, which torch's
    compiler refuses."""
    graph = profile.program.graph
    if graph is None or not graph.second_order:
        return fix, code
    twice = "Only what is not differentiated twice: torch.compile has no second derivatives."
    return f"{fix} {twice}", ""


def of_model(profile: Profile, share: float) -> Mapping[Phase, float]:
    """Returns that part of forward and backward, by phase."""
    return {phase: share * profile.spent_ns(phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}


def model_ns(profile: Profile) -> float:
    """Returns the time of forward and backward together."""
    return sum(of_model(profile, 1.0).values())
