"""Adds up what the operations of an autograd graph amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import prod
from typing import Any

from diagnose.core.graph import HEAVY_NS
from diagnose.hooks._graph import (
    FUSED_ATTENTION,
    MATMULS,
    SMALL_ELEMENTS,
    SMALL_FLOPS,
    Node,
    behind_views,
    is_small,
    views_for,
)
from diagnose.hooks._graph_attention import dropped_weights, has_trained_bias, written_out_attention

SLOW_NS = 50_000
"""A node that takes longer in the backward pass computes, and is not only dispatched, however few numbers
it gives: the factors of many small matrices, say, or a slice, whose gradient is as large as the whole."""

POINTWISE_NAMES = """
    Abs Add Addcdiv Addcmul Clamp Cos Div Elu Erf Exp Gelu Hardswish LeakyRelu Log MaskedFill Mul
    Neg Pow Reciprocal Relu Rsqrt Sigmoid Silu Sin Softplus Sqrt Sub Tanh ToCopy Where
"""
POINTWISE = frozenset(POINTWISE_NAMES.split())


def summarize(nodes: list[Node], truncated: bool, wanted: Collection[int]) -> dict[str, Any]:
    """Returns the facts of `core.graph.Graph`.

    Args:
        nodes: From `walk`.
        truncated: Likewise.
        wanted: Identities of the parameters that an optimizer updates; empty when none is known.
    """
    ops = [node for node in nodes if node.is_op]
    attention, places = written_out_attention(ops)
    leaves = [node for node in nodes if node.leaf and node.weight]
    unwanted = _work([])
    # Else the optimizers hold copies or shards of the parameters, and nothing tells what is not used.
    knows = any(node.leaf in wanted for node in nodes if node.leaf)
    if knows and not truncated:
        unwanted = work_for_nothing(*unwanted_of(nodes, wanted))
    chained = [
        op for op in ops if op.name in POINTWISE and len(op.users) == 1 and op.users[0].name in POINTWISE
    ]
    small = [op for op in ops if is_small(op)]
    slices = [view for view in views_for(nodes, small) if (view.backward_ns or 0) <= SLOW_NS]
    heavy = [op for op in ops if op.forward_ns >= HEAVY_NS]
    saving = [op for op in ops if op.saves]
    recomputed = [op for op in saving if op.recomputed]
    products = [op for op in ops if op.flops]
    whole = sum(op.cost for op in saving)
    return {
        "num_nodes": len(nodes),
        "truncated": truncated,
        "names": dict(Counter(node.name for node in nodes).most_common(40)),
        "total": work_of(nodes),
        "convolutions": _work([op for op in ops if op.name.startswith("Convolution")]),
        "small_ops": {**_work(small), **_times([*small, *slices])},
        "double": _work([op for op in ops if op.double and _computes(op)]),
        "heavy": _work(heavy) if any(op.backward_ns is not None for op in ops) else None,
        "small_depth": longest_chain(nodes, {id(op) for op in small}),
        "product_bytes": max(products, key=lambda op: op.flops).item_bytes if products else None,
        "product_rows": most_rows(ops),
        "attention": _work(attention),
        "attention_products": _work([op for op in attention if op.name in MATMULS]),
        "num_attentions": len(places),
        "fused_attention": _work([op for op in ops if op.name.startswith(FUSED_ATTENTION)]),
        "attention_keys": max((softmax.shape[-1] for softmax in places), default=None),
        "attention_axes": min((len(softmax.shape) for softmax in places), default=None),
        "attention_drops": any(op.name == "Mul" or "Dropout" in op.name for op in dropped_weights(ops)),
        "attention_biased": has_trained_bias(attention),
        "pointwise": _work(chained),
        "unaligned": _work([op for op in ops if op.flops and _is_unaligned(op)]),
        "unwanted": unwanted,
        "num_unwanted_tensors": sum(leaf.leaf not in wanted for leaf in leaves) if knows else 0,
        "num_unreached_tensors": len(set(wanted) - {leaf.leaf for leaf in leaves}) if knows else 0,
        "recomputed_share": sum(op.cost for op in recomputed) / whole if whole else 0.0,
        "num_recomputed": len(recomputed),
        "num_checkpoints": sum(node.is_region for node in nodes),
        "regions": _work([node for node in nodes if node.is_region]),
        "second_order": any(node.second for node in nodes),
        "has_dropout": any("Dropout" in node.name for node in nodes),
    }


def longest_chain(nodes: list[Node], counted: Collection[int]) -> int:
    """Returns the most of the counted nodes, given by identity, of which each needs the one before."""
    depth: dict[int, int] = {}
    # An operation is made after its inputs.
    for node in sorted((node for node in nodes if not node.leaf), key=lambda node: node.sequence):
        before = max((depth.get(id(parent), 0) for parent in node.inputs), default=0)
        depth[id(node)] = before + (id(node) in counted)
    return max(depth.values(), default=0)


def most_rows(ops: list[Node]) -> int | None:
    """Returns the rows of the matrix products, by their number, that most multiplications are in."""
    flops: Counter[int] = Counter()
    for op in ops:
        if op.flops and len(op.shape) > 1 and "onvolution" not in op.name:
            flops[prod(op.shape[:-1])] += round(op.flops)
    return flops.most_common(1)[0][0] if flops else None


def unwanted_of(nodes: list[Node], wanted: Collection[int]) -> tuple[list[Node], list[Node]]:
    """Returns the operations that lead to no leaf that is wanted, and the products before these, or before
    an unwanted weight, which make a gradient for them.

    Args:
        nodes: From `walk`; they are marked.
        wanted: Identities of the leaves that are.
    """
    mark_wanted(nodes, wanted)
    unwanted = [node for node in nodes if node.is_op and not node.wanted]
    edge = [
        node
        for node in nodes
        if node.wanted
        and node.name in MATMULS
        and any(not behind.wanted and len(behind.shape) > 1 for behind in behind_views(node))
    ]
    return unwanted, edge


def work_for_nothing(unwanted: list[Node], edge: list[Node]) -> dict[str, Any]:
    """Returns what `unwanted_of` comes to, as the facts of `core.graph.Work`: of what a product does in the
    backward pass, half."""
    work = _work(unwanted)
    work["flops"] += sum(op.flops for op in edge) / 2
    if _times([*unwanted, *edge])["backward_ns"] is None:
        work["backward_ns"] = None
    else:
        work["backward_ns"] = (work["backward_ns"] or 0.0) + sum((op.backward_ns or 0) / 2 for op in edge)
    return work


def work_of(nodes: list[Node]) -> dict[str, Any]:
    """Returns what all of a graph's operations amount to, as the facts of `core.graph.Work`; its times are
    those of all nodes, views too."""
    return {**_work([node for node in nodes if node.is_op]), **_times(nodes)}


def _work(ops: list[Node]) -> dict[str, Any]:
    return {
        "num_ops": len(ops),
        "flops": sum(op.flops for op in ops),
        "num_bytes": sum(op.num_bytes for op in ops),
        **_times(ops),
    }


def _times(nodes: list[Node]) -> dict[str, float | None]:
    """Returns what nodes took, where a clock was on them."""
    timed = [node for node in nodes if node.backward_ns is not None]
    if nodes and not timed:
        return {"backward_ns": None, "forward_ns": None}
    return {
        "backward_ns": float(sum(node.backward_ns or 0 for node in timed)),
        "forward_ns": sum(node.forward_ns for node in timed),
    }


def _computes(op: Node) -> bool:
    """Whether an operation takes longer than it takes to be dispatched."""
    by_size = op.numel > SMALL_ELEMENTS or op.flops > SMALL_FLOPS
    return by_size or (op.backward_ns or 0) > SLOW_NS


def _is_unaligned(op: Node) -> bool:
    return bool(op.shape[-1] % 8 or round(op.inner) % 8)


def mark_wanted(nodes: list[Node], wanted: Collection[int]) -> None:
    """Marks the nodes through which a gradient reaches what is updated, or an input that asks for it."""
    for node in nodes:
        if node.leaf:
            node.wanted = node.leaf in wanted or not node.weight
    # An operation is made after its inputs.
    for node in sorted((node for node in nodes if not node.leaf), key=lambda node: node.sequence):
        # A function of the script's own (checkpointing, above all) hides what is inside.
        hides = node.name.endswith("Backward")
        node.wanted = hides or any(parent.wanted for parent in node.inputs)
