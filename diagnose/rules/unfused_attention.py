"""Attention is written out instead of fused"""

from __future__ import annotations

from math import inf
from typing import Any

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._compute import of_work
from diagnose.rules._examples import profile
from diagnose.rules._lines import share_of
from diagnose.rules.base import WORTH_SHARE, Rule

SAVED = (0.5, 1.0, 1.2)
"""Of what lies between the products, less one product that is computed again, what the fused kernel saves.
It still takes the exponentials, and spares the products some memory."""

SAVED_ON_CPU = (0.25, 1.0, 1.6)
"""Likewise on CPUs, of what is told by the next ones."""

FUSED, FUSED_OF_THREADS = ((64, 1.5), (inf, 0.85)), ((48, 3.0), (96, 1.8), (192, 1.3), (inf, 1.05))
"""What the fused kernel takes on a CPU of so many keys at most, as a multiple of the products and one of
them again: of one thread, and of several. From 192 tokens on it works in larger blocks. Measured by
`benchmarks/attention.py` for 32 to 256 keys, heads of 16 to 64, with and without a mask: 0.5 to 0.9 of one
thread from 64 keys on; of two 2.9 at 32, 1 to 1.8 at 64, 0.9 to 1.5 below 192, 0.8 to 1.1 from there on.
Without a mask there is so little between the products that two threads are slower with it below 192."""

CALLED = "SafeSoftmax"
"""The softmax of `scaled_dot_product_attention` where it computes step by step; nothing else has it."""

WRITTEN_OUT = "Replace softmax(q k^T) v by scaled_dot_product_attention."
OF_LIBRARIES = (
    " nn.MultiheadAttention calls it itself with need_weights=False, and a model of Transformers with"
    ' attn_implementation="sdpa".'
)
CODE = "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...)"
FUSED_AXES = 4
OF_ONE_HEAD = (
    "y = torch.nn.functional.scaled_dot_product_attention("
    "q[:, None], k[:, None], v[:, None], is_causal=...)[:, 0]"
)
AXES = " Its fused kernels want tensors of four axes: batch, heads, tokens, features."
ON_CPU = (
    "On a CPU no fused kernel has dropout of the attention's weights, nor a mask with gradients. Without"
    " that dropout it would be fused (dropout_p=0.0; of a Transformers model attention_dropout=0.0 or"
    " attention_probs_dropout_prob=0.0), which trains another model."
)
ON_DEVICE = (
    "Call it once under torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION), and under"
    " EFFICIENT_ATTENTION: torch says why it refuses the kernel."
)


def written_out(
    num_ops: int, num_attentions: int = 4, called: int = 0, *, masked: bool = True, **facts: Any
) -> Program:
    """Returns a program with so many operations of attention; without a mask most of it are products."""
    attention = Work(num_ops=num_ops, flops=num_ops * 4e6, num_bytes=num_ops * 4e6)
    num_bytes = num_ops * (1e6 if masked else 2.8e6)
    products = Work(num_ops=num_ops // 3, flops=attention.flops, num_bytes=num_bytes)
    rest = Work(num_ops=60, flops=1e9, num_bytes=4e7)
    total = Work(
        num_ops=rest.num_ops + num_ops,
        flops=rest.flops + attention.flops,
        num_bytes=rest.num_bytes + attention.num_bytes,
    )
    return Program(
        graph=Graph(
            num_nodes=300,
            total=total,
            attention=attention,
            attention_products=products,
            num_attentions=num_attentions,
            names={CALLED: called} if called else {},
            **facts,
        )
    )


TWO = HostStats(num_threads=2)


class UnfusedAttention(Rule):
    """
    ## What it means
    The model multiplies queries with keys, takes a softmax, and multiplies with the values, one operation
    after the other. The scores, one number per pair of tokens, are written and read several times.

    The gain: the fused kernel computes the same products. What goes is all that lies between them, the
    scaling, the mask, the softmax and the dropout, in both passes; what comes is that the backward pass
    computes the scores once more. The sampled lines tell what all of it takes in the forward pass; on a
    CPU, a few backward passes are timed operation by operation, and a product takes half as long forward.
    Where there is neither, the sizes of the results tell.

    ## What to do
    Call `torch.nn.functional.scaled_dot_product_attention`, which does all of it in one kernel. Where it
    is called already and computes step by step all the same, something keeps it from its kernels: on a CPU
    that is most often dropout of the attention's weights.

    ## When it is wrong
    Attention whose weights are needed themselves, or changed in a way that the fused kernel has no argument
    for.
    """

    needs = ("program.graph",)
    actions = ("sdpa",)
    explains = ("small-operators",)
    fires_on = (
        profile(program=written_out(30)),
        profile(program=written_out(16)),
        profile(program=written_out(30, called=4)),
        profile(program=written_out(30, called=4), device="cuda"),
        profile(program=written_out(30, attention_keys=176), host=TWO),
        profile(program=written_out(30, masked=False, attention_keys=64)),
        profile(program=written_out(30, masked=False, attention_keys=192), host=TWO),
        profile(program=written_out(30, attention_biased=True), device="cuda"),
    )
    silent_on = (
        profile(program=written_out(0, num_attentions=0)),
        profile(program=written_out(1)),
        profile(program=written_out(30, masked=False, attention_keys=63)),
        profile(program=written_out(30, masked=False, attention_keys=191), host=TWO),
        profile(program=written_out(30, attention_keys=40), host=TWO),
        profile(program=written_out(30, attention_biased=True)),
    )

    def check(self, profile: Profile) -> Finding | None:
        graph = profile.program.graph
        assert graph is not None
        on_cpu = profile.run.device == "cpu"
        if not graph.num_attentions or (on_cpu and graph.attention_biased):
            return None  # a CPU has no fused kernel with a mask that gets gradients
        saved, fused = (SAVED_ON_CPU, fused_on_cpu(profile, graph)) if on_cpu else (SAVED, 1.0)
        whole = of_work(profile, graph.attention, graph)
        products = products_of(profile, graph)
        lines = [
            line
            for line in profile.where
            if "attention" in line.idiom and line.phase is Phase.FORWARD and not line.in_worker
        ]
        seen_ns = share_of(lines) * profile.step_time_ns
        if seen_ns:
            whole[Phase.FORWARD] = seen_ns
        between = {phase: whole[phase] - fused * products[phase] for phase in whole}
        between[Phase.BACKWARD] -= fused * products[Phase.FORWARD] / 2
        lost_ns = saved[1] * sum(between.values())
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        won = {phase: max(0.0, ns) for phase, ns in between.items()}
        lost = {phase: lost_ns * ns / sum(won.values()) for phase, ns in won.items()}
        share = sum(whole.values()) / profile.step_time_ns
        called = graph.names.get(CALLED, 0) >= graph.num_attentions
        dropped = on_cpu and graph.attention_drops
        flat = graph.attention_axes is not None and graph.attention_axes < FUSED_AXES
        kept = dropped or (called and not flat)
        stepwise = ON_CPU if on_cpu else ON_DEVICE
        replace_it = WRITTEN_OUT + (AXES if flat else "") + ("" if lines else OF_LIBRARIES)
        return Finding(
            rule=self.name,
            summary="scaled_dot_product_attention finds no fused kernel and computes step by step"
            if called
            else f"Attention is written out in {graph.num_attentions} places instead of fused.",
            lost_ns=lost,
            low_ns=0.0 if kept else lost_ns * saved[0] / saved[1],
            high_ns=lost_ns * saved[2] / saved[1],
            assumption=f"the fused kernel takes {fused:.2g} times the products and one of them again",
            evidence=(
                f"The graph has {graph.num_attentions} softmaxes between two batched products.",
                f"These {graph.attention.num_ops} operations write"
                f" {format_bytes(graph.attention.num_bytes)}"
                f" and take about {format_share(share)} of the step.",
            ),
            file=lines[0].file if lines else "",
            line=lines[0].line if lines else 0,
            fix=stepwise if kept else AXES.lstrip() if called else replace_it,
            code="" if kept else OF_ONE_HEAD if flat else CODE,
            actions=self.actions,
        )


def fused_on_cpu(profile: Profile, graph: Graph) -> float:
    """Returns how long the fused kernel of a CPU takes, as a multiple of the products and one again."""
    factors = FUSED if (profile.host.num_threads or 1) == 1 else FUSED_OF_THREADS
    keys = graph.attention_keys
    return factors[-1][1] if keys is None else next(factor for most, factor in factors if keys < most)


def products_of(profile: Profile, graph: Graph) -> dict[Phase, float]:
    """Returns what the products take in forward and backward; each is two in the backward pass."""
    whole_ns, work = graph.total.backward_ns, graph.attention_products
    if not whole_ns or work.forward_ns is None or work.backward_ns is None:
        return of_work(profile, work, graph)
    # As much slower than in the quickest passes, which were timed, as the whole backward pass is.
    stretch = profile.spent_ns(Phase.BACKWARD) / whole_ns
    return {Phase.FORWARD: stretch * work.forward_ns, Phase.BACKWARD: stretch * work.backward_ns}
