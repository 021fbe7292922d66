"""Attention is written out instead of fused"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._compute import cost_share, of_model
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

SAVED = (0.25, 0.6, 0.85)
"""What the fused kernel saves of the written-out operations' time: it computes the same products and
never stores the scores."""


def written_out(num_ops: int, num_attentions: int = 4) -> Program:
    attention = Work(num_ops=num_ops, flops=num_ops * 4e6, num_bytes=num_ops * 4e6)
    rest = Work(num_ops=60, flops=1e9, num_bytes=4e7)
    total = Work(
        num_ops=rest.num_ops + num_ops,
        flops=rest.flops + attention.flops,
        num_bytes=rest.num_bytes + attention.num_bytes,
    )
    return Program(
        graph=Graph(num_nodes=300, total=total, attention=attention, num_attentions=num_attentions)
    )


class UnfusedAttention(Rule):
    """
    ## What it means
    The model multiplies queries with keys, takes a softmax, and multiplies with the values, one operation
    after the other. The scores, one number per pair of tokens, are written and read several times.

    ## What to do
    Call `torch.nn.functional.scaled_dot_product_attention`, which does all of it in one kernel.

    ## When it is wrong
    Attention whose weights are needed themselves, or changed in a way that the fused kernel has no argument
    for.
    """

    needs = ("program.graph",)
    actions = ("sdpa",)
    explains = ("small-operators",)
    fires_on = (profile(program=written_out(30)), profile(program=written_out(16)))
    silent_on = (profile(program=written_out(0, num_attentions=0)), profile(program=written_out(1)))

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        graph = profile.program.graph
        assert graph is not None
        if not graph.num_attentions:
            return None
        share = cost_share(graph.attention, graph)
        lost = of_model(profile, SAVED[1] * share)
        lost_ns = sum(lost.values())
        if lost_ns < 0.02 * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Attention is written out in {graph.num_attentions} places instead of fused.",
            lost_ns=lost,
            low_ns=lost_ns * SAVED[0] / SAVED[1],
            high_ns=lost_ns * SAVED[2] / SAVED[1],
            assumption="operations take time by their sizes; the fused kernel never stores the scores",
            evidence=(
                f"The graph has {graph.num_attentions} softmaxes between two batched products.",
                f"These {graph.attention.num_ops} operations write"
                f" {format_bytes(graph.attention.num_bytes)}"
                f" and are about {format_share(share)} of the model's work.",
            ),
            fix="Replace softmax(q k^T) v by scaled_dot_product_attention.",
            code="y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...)",
            actions=self.actions,
        )
