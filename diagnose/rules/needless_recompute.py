"""Activations are computed again although memory is free"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Memory, Model, Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._device import busy_ns
from diagnose.rules._examples import GIB, card, profile
from diagnose.rules._phases import shared
from diagnose.rules.base import WORTH_SHARE, Rule

KEEP_FREE = 0.3
"""Part of the memory that must remain free when activations are kept: peers use the same bound."""

KEPT_PER_RESULT = 2.0
"""Bytes kept for the backward pass per byte of results: inputs, masks and copies come on top."""

AGAIN = 0.25
"""Of a device's time in a model that is computed twice: the forward is half of its backward, and there are
two of it. The host's phases do not tell, because the host runs ahead."""

HANDLING_NS = 50_000
"""What an operation in a checkpointed region takes besides, on the host: a holder instead of each tensor
that it saves, and its place in the region. Of layers of 80 and 256 features, and of a `tanh` alone, regions
lost 0.37, 0.27 and 0.08 ms more than their forward, with 5, 5 and 1 such operations (torch 2.13, one
thread; 2026-11-26)."""

REGION_NS = 100_000
"""What a region of the older, reentrant kind takes besides: 0.2, 0.17 and 0.06 ms for the same."""

REGION = "CheckpointFunctionBackward"

LOW, HIGH = 0.7, 1.25
"""The second computation meets other caches than the first, and frees what the first kept."""


def checkpointed(share: float, **changes: object) -> Program:
    total = Work(num_ops=200, flops=1e9, num_bytes=1e9)
    facts = {"total": total, "recomputed_share": share, **changes}
    graph = Graph(num_nodes=400, **facts)  # type: ignore[arg-type]
    return Program(graph=graph, memory=Memory(rss_bytes=4 * GIB, total_bytes=32 * GIB))


def timed(share: float) -> dict[str, Work]:
    """A part of the forward is inside of regions, which take three times as long in the backward pass."""
    total = Work(num_ops=200, flops=1e9, num_bytes=1e9, backward_ns=60e6, forward_ns=30e6)
    return {"total": total, "regions": Work(num_ops=1, backward_ns=90e6 * share, forward_ns=30e6 * share)}


def on_device(share: float) -> Program:
    return replace(checkpointed(share), models=(Model(kind="Net", device="cuda"),))


FULL = Program(graph=checkpointed(1).graph, memory=Memory(rss_bytes=27 * GIB, total_bytes=32 * GIB))


class NeedlessRecompute(Rule):
    """
    ## What it means
    Activation checkpointing throws the results of the forward pass away and computes them once more in the
    backward pass. That saves memory, and this run has memory to spare. A function of the script's own whose
    `backward` computes the forward again does the same.

    ## What to do
    Take the checkpointing off, or checkpoint fewer layers.

    ## When it is wrong
    Longer sequences or larger batches are still to come in the run. On a device it reads the peak of memory
    and the busy share; no run on a GPU has tried that yet.
    """

    needs = ("program.graph", "headroom_bytes")
    fires_on = (
        profile(program=checkpointed(1.0)),
        profile(program=checkpointed(0.3)),
        profile(program=checkpointed(0.03, num_recomputed=30)),
        profile(program=checkpointed(0, num_checkpoints=12, inside_bytes=2e9)),
        profile(program=checkpointed(0, num_checkpoints=1, inside_bytes=1e8, **timed(0.1))),
        profile(device=card(peak_bytes=20 * GIB), program=on_device(1.0)),
    )
    silent_on = (
        profile(program=checkpointed(0)),
        profile(program=checkpointed(0.005, num_recomputed=1)),
        profile(program=FULL),
        profile(program=checkpointed(0, num_checkpoints=12)),
        profile(program=checkpointed(0, num_checkpoints=1, inside_bytes=1e8, **timed(0.03))),
        profile(program=checkpointed(0, num_checkpoints=32, inside_bytes=16e9)),
        profile(device=card(peak_bytes=60 * GIB), program=on_device(1.0)),
        profile(device=card(peak_bytes=20 * GIB, busy_share=None), program=on_device(1.0)),
    )

    def applies(self, profile: Profile) -> bool:
        graph = profile.program.graph
        return graph is not None and bool(graph.recomputed_share or graph.num_checkpoints)

    def check(self, profile: Profile) -> Finding | None:
        graph = profile.program.graph
        free, total = profile.headroom_bytes, profile.memory_bytes
        assert graph is not None and free is not None and total is not None
        if graph.num_checkpoints and graph.inside_bytes is None:
            return None  # what is inside would have to be kept, and nobody knows how much that is
        kept_bytes = KEPT_PER_RESULT * (graph.total.num_bytes + (graph.inside_bytes or 0.0))
        if free - kept_bytes < KEEP_FREE * total:
            return None
        share = max(graph.recomputed_share, inside_share(graph))
        backward_ns = profile.spent_ns(Phase.BACKWARD)
        again_ns = share * profile.spent_ns(Phase.FORWARD)
        handling_ns = profile.steps.passes * handled_ns(graph)
        lost_ns = min(again_ns + handling_ns, 0.7 * backward_ns)
        if profile.run.device != "cpu":
            again_ns = lost_ns = AGAIN * share * busy_ns(profile)
            handling_ns = 0.0
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        lost = {Phase.BACKWARD: lost_ns} if profile.run.device == "cpu" else shared(profile, lost_ns)
        where = f"{graph.num_checkpoints} checkpointed regions" if graph.num_checkpoints else "its graph"
        return Finding(
            rule=self.name,
            summary=f"The backward pass computes {format_share(share)} of the forward again.",
            lost_ns=lost,
            low_ns=LOW * lost_ns,
            high_ns=max(lost_ns, min(HIGH * lost_ns, backward_ns)),
            assumption="computing again takes as long as computing did",
            evidence=(
                f"By {where}, {format_share(share)} of the forward, {format_ms(again_ns)}, is computed"
                f" twice{f', and kept track of, {format_ms(handling_ns)}' if handling_ns else ''}.",
                f"{format_bytes(free)} of {format_bytes(total)} are free; keeping the results takes about"
                f" {format_bytes(kept_bytes)}.",
            ),
            fix="Call the layers directly instead of through torch.utils.checkpoint, or through a function"
            " that computes them again in its backward().",
        )


def handled_ns(graph: Graph) -> float:
    """Returns what the host takes for what a pass computes again, besides computing it."""
    return HANDLING_NS * graph.num_recomputed + REGION_NS * graph.names.get(REGION, 0)


def inside_share(graph: Graph) -> float:
    """Returns the part of the forward inside of regions that are one node of the graph: by the time that
    these took, else by the bytes of their results."""
    if not graph.num_checkpoints:
        return 0.0
    if graph.regions.forward_ns and graph.total.forward_ns:
        return min(1.0, graph.regions.forward_ns / graph.total.forward_ns)
    inside = graph.inside_bytes or 0.0
    return inside / (inside + graph.total.num_bytes) if inside else 0.0
