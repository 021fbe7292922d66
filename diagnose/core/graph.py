"""What one forward pass computed, as its autograd graph and its compiler tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HEAVY_NS = 80_000
"""Threads divide an operation, or a module's forward, that takes less to no gain: measured with layers of
256 to 512 features, threads won nothing at 60 us and two thirds of what they could at 100 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What some operations of a forward pass amount to.

    Attributes:
        num_ops: Operations that compute; views are not counted.
        flops: Multiplications and additions of their matrix products and convolutions.
        num_bytes: Bytes of their results.
        backward_ns: What their nodes took in the quickest of a few backward passes; `None` where no clock
            was on them, as on a device.
        forward_ns: Likewise in the forward pass, told from `backward_ns`: a product has one product in it
            there for two in the backward pass, and anything else about as much work.
    """

    num_ops: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0
    backward_ns: float | None = None
    forward_ns: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The autograd graph of one backward pass, about the tenth, walked once. `None` was not seen.

    What a compiled region computes is one node here.

    Attributes:
        num_nodes: Nodes that were walked.
        truncated: Whether the walk stopped at its limit; the figures are then those of a part.
        names: How often each kind of node occurs.
        total: All operations; its times are those of all nodes, views too.
        convolutions: Those of `total` that are convolutions.
        small_ops: Operations with a result of a few thousand elements at most; its times are also those of
            the views that only these use, except where a view computes long.
        double: Operations whose result is float64 or complex128, without those of a few thousand elements.
        heavy: Operations that take long enough in the forward pass to be divided among threads; `None`
            where no clock was on them.
        looped: Short operations that loops of the script make again and again with the same parameters, or
            with none; its times are also those of the slices that a turn takes for them.
        looped_depth: The most of these of which each needs the one before.
        small_depth: The most of `small_ops` of which each needs the one before.
        product_bytes: Bytes of a number of the result of the matrix product with most multiplications.
        product_rows: Rows of the matrix products that most multiplications are in.
        attention: Operations between the two products of attention that is written out, and these.
        attention_products: The products among `attention`.
        num_attentions: Places where attention is written out.
        fused_attention: Operations that are attention in one kernel.
        attention_keys: Most keys that a query is compared with in one of these places.
        attention_axes: Fewest axes that the scores have in one of them.
        attention_drops: Whether its weights are dropped, or multiplied by anything else, after a softmax.
        attention_biased: Whether something with a gradient of its own is added to its scores.
        pointwise: Elementwise operations whose only user is another elementwise operation.
        unaligned: Matrix products with a dimension that is no multiple of 8.
        unwanted: Operations whose gradients reach no parameter that an optimizer updates; of the products
            before them or before an unwanted weight, half the multiplications and of the backward time.
        num_unwanted_tensors: Parameters that get a gradient and that no optimizer updates.
        num_resting_tensors: Those of them that an optimizer has, in a group whose learning rate is 0.
        num_unreached_tensors: Parameters that an optimizer updates and this pass does not reach.
        recomputed_share: Part of the operations that save nothing and are computed again in the backward
            pass (activation checkpointing).
        num_recomputed: How many of these save nothing.
        num_checkpoints: Checkpointed regions of the older, reentrant kind, and nodes of the script's own
            that compute a part of the forward again; what is inside is not in the graph.
        regions: These, each as one operation.
        inside_bytes: Bytes of the results that are computed again inside these regions.
        wasted_share: Part of the nodes, created between two passes, that no backward pass went through: of
            a forward whose result was thrown away.
        second_order: Whether a gradient is differentiated once more, as for a gradient penalty.
        has_dropout: Whether there is dropout.
        keeps_stacks: Whether the forward pass kept a stack for each node, as anomaly detection does.
        searches_nan: Whether that was on around the backward pass.
    """

    num_nodes: int
    truncated: bool = False
    names: Mapping[str, int] = field(default_factory=dict)
    total: Work = Work()
    convolutions: Work = Work()
    small_ops: Work = Work()
    double: Work = Work()
    heavy: Work | None = None
    looped: Work | None = None
    looped_depth: int | None = None
    small_depth: int | None = None
    product_bytes: int | None = None
    product_rows: int | None = None
    attention: Work = Work()
    attention_products: Work = Work()
    num_attentions: int = 0
    fused_attention: Work = Work()
    attention_keys: int | None = None
    attention_axes: int | None = None
    attention_drops: bool = False
    attention_biased: bool = False
    pointwise: Work = Work()
    unaligned: Work = Work()
    unwanted: Work = Work()
    num_unwanted_tensors: int = 0
    num_resting_tensors: int = 0
    num_unreached_tensors: int = 0
    recomputed_share: float = 0.0
    num_recomputed: int = 0
    num_checkpoints: int = 0
    regions: Work = Work()
    inside_bytes: float | None = None
    wasted_share: float | None = None
    second_order: bool = False
    has_dropout: bool = False
    keeps_stacks: bool = False
    searches_nan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Gradients of some backward passes, about the twentieth, that were gone before a step could use them.

    A loop with one optimizer is only looked at where that steps without a gradient of some parameter.

    Attributes:
        num_tensors: Parameters whose gradient was thrown away after each pass of a kind.
        total: All operations of these passes.
        unwanted: Those that made what was thrown away.
        never_used: Whether, of the kind that drops most, the optimizers of these parameters step without
            them after each pass: they are not trained at all.
        is_apart: Whether that is mostly a part of the graph of its own, which could be cut off.
        file: Where the pass that drops most was begun, absolute; empty when unknown.
        line: Its line.
    """

    num_tensors: int
    total: Work
    unwanted: Work
    never_used: bool = False
    is_apart: bool = False
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A place where a compiled function had to go back to Python.

    Attributes:
        reason: Dynamo's own words, their first line.
        file: The user's file; empty when unknown.
        line: Its line.
    """

    reason: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What `torch.compile` did, from its own counters.

    Attributes:
        num_compilations: Frames that were compiled, again or for the first time.
        num_recompilations: Those that were compiled again because a guard failed.
        limit_hits: Frames that Dynamo gave up compiling after too many recompilations.
        reasons: Why frames were compiled again, the last ones, in Dynamo's words.
        breaks: Graph breaks, one per place.
        skipped: Functions that it gave up on and that run uncompiled, as for a break inside a loop; the
            place is what it could not compile.
        file: File of the function that was compiled most often; empty when unknown.
        line: Its first line.
        function: Its name.
    """

    num_compilations: int
    num_recompilations: int = 0
    limit_hits: int = 0
    reasons: tuple[str, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    skipped: tuple[GraphBreak, ...] = ()
    file: str = ""
    line: int = 0
    function: str = ""
