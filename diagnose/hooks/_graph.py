"""The nodes of an autograd graph, as one walk over it sees them.

Nothing that the graph saved is unpacked, and no node is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod, sqrt
from time import perf_counter_ns
from typing import Any

MAX_NODES = 20_000
MAX_TIME_NS = 100_000_000
"""The walk is on the training thread, once: a tenth of a second is the most it may take."""

SMALL_ELEMENTS = 16_384
SMALL_FLOPS = 2e6
"""An operation below both computes for less time than it takes to be dispatched."""

LEAF_SEQUENCE = 2**63
"""Leaves have a sequence number above this: they are no operation's."""

VIEWS_NAMES = """
    Alias AsStrided Expand Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze Swapaxes
    T Transpose Unbind Unfold UnsafeSplit UnsafeView Unsqueeze View ViewAsReal ViewAsComplex
"""
VIEWS = frozenset(VIEWS_NAMES.split())
MATMULS_NAMES = """
    Addbmm Addmm Addmv Baddbmm Bmm Convolution ConvolutionOverrideable Linear MkldnnLinear Mm Mv
"""
MATMULS = frozenset(MATMULS_NAMES.split())
REGION = "CheckpointFunctionBackward"
"""A checkpointed region of the older, reentrant kind."""
MAX_INNER = 4
"""Backward passes inside of one node that computes its forward again; a solver that goes step by step, as
the adjoint of a differential equation does, has more."""

FUSED_ATTENTION = "ScaledDotProduct"

UNSIGNED = 2**64
"""A node tells a negative axis as an unsigned number of 64 bits."""


@dataclass(slots=True)
class Node:
    """One node, as far as it is looked at."""

    name: str
    sequence: int
    shape: tuple[int, ...]
    item_bytes: int
    double: bool = False
    inputs: list[Node] = field(default_factory=list)
    users: list[Node] = field(default_factory=list)
    leaf: int = 0
    constant: bool = False
    weight: bool = False
    saves: bool = False
    recomputed: bool = False
    wanted: bool = False
    second: bool = False
    axis: int | None = None
    backward_ns: int | None = None
    num_inner: int = 0

    @property
    def numel(self) -> int:
        """Elements of the operation's first result."""
        return prod(self.shape)

    @property
    def is_region(self) -> bool:
        """Whether it computes a part of the forward again before it goes back through that."""
        return self.name == REGION or 0 < self.num_inner <= MAX_INNER

    @property
    def is_op(self) -> bool:
        """Whether it computes, rather than looks at the same memory in another way."""
        return not self.leaf and self.name not in VIEWS

    @property
    def flops(self) -> float:
        """Multiplications and additions of a product; 0 for anything else."""
        if self.name not in MATMULS or not self.shape:
            return 0.0
        return 2.0 * self.numel * self.inner

    @property
    def inner(self) -> float:
        """Length of the sums of a matrix product, from the sizes of its operands."""
        sizes = [max(1, parent.numel) for parent in self.inputs if len(parent.shape) > 1]
        if self.name.startswith("Convolution"):
            weights = [parent for parent in self.inputs if parent.weight and len(parent.shape) > 2]
            return prod(weights[0].shape[1:]) if weights else 1.0
        if len(sizes) >= 2:
            batch = prod(self.shape[:-2]) if len(self.shape) > 2 else 1
            return sqrt(sizes[-1] * sizes[-2] / max(1, self.numel) / max(1, batch))
        return sizes[-1] / self.shape[-1] if sizes else 1.0

    @property
    def num_bytes(self) -> float:
        """Bytes of the result."""
        return float(self.numel * self.item_bytes)

    @property
    def forward_ns(self) -> float:
        """About what the operation takes in the forward pass, by what its node takes in the backward."""
        products = 1.0
        if self.name in MATMULS and sum(len(parent.shape) > 1 for parent in self.inputs) > 1:
            products = 2.0  # one for each operand's gradient
        elif self.name.startswith(FUSED_ATTENTION):
            products = 2.5  # five for two: the scores are computed again
        elif self.is_region:
            products = 3.0  # what is inside of it once more, and its backward
        return (self.backward_ns or 0) / products

    @property
    def cost(self) -> float:
        """About its nanoseconds on one core. Good for shares of a whole only."""
        return 3000.0 + self.flops / 50 + self.num_bytes / 5 if self.is_op else 1000.0


def walk(root: Any, recomputing: bool = False, passed: list[Any] | None = None) -> tuple[list[Node], bool]:
    """Visits every node below `root`, each once, breadth first.

    Args:
        root: A `grad_fn`.
        recomputing: Whether to look which nodes save nothing (checkpointing without reentry).
        passed: Gets every `grad_fn`, in the order of the nodes; whoever asks must soon let go of them.

    Returns:
        The nodes, and whether the walk was cut short.
    """
    begun = perf_counter_ns()
    first = _read(root, recomputing)
    seen = {root: first}
    queue = deque([root])
    while queue:
        grad_fn = queue.popleft()
        node = seen[grad_fn]
        for parent, _ in grad_fn.next_functions:
            if parent is None:
                node.constant = True
                continue
            known = seen.get(parent)
            if known is None:
                if len(seen) >= MAX_NODES or perf_counter_ns() - begun > MAX_TIME_NS:
                    return _all(seen, passed), True
                known = seen[parent] = _read(parent, recomputing)
                queue.append(parent)
            node.inputs.append(known)
            known.users.append(node)
    return _all(seen, passed), False


def _all(seen: dict[Any, Node], passed: list[Any] | None) -> list[Node]:
    if passed is not None:
        passed.extend(seen)
    return list(seen.values())


def _read(grad_fn: Any, recomputing: bool) -> Node:
    name = grad_fn.name()
    if name.endswith("AccumulateGrad"):
        variable = grad_fn.variable
        return Node(
            name="AccumulateGrad",
            sequence=LEAF_SEQUENCE,
            shape=tuple(variable.shape),
            item_bytes=variable.element_size(),
            leaf=id(variable),
            weight=type(variable).__name__ != "Tensor",
        )
    shape: tuple[int, ...] = ()
    item_bytes, double = 0, False  # unknown
    metadata = getattr(grad_fn, "_input_metadata", ())
    if metadata:
        dtype = metadata[0].dtype
        shape, item_bytes = tuple(int(size) for size in metadata[0].shape), dtype.itemsize
        double = item_bytes == (16 if dtype.is_complex else 8)
    node = Node(
        name=_plain(name),
        sequence=grad_fn._sequence_nr(),
        shape=shape,
        item_bytes=item_bytes,
        double=double,
        second="BackwardBackward" in name,
        axis=_axis(grad_fn, len(shape)) if "oftmax" in name else None,
    )
    if recomputing:
        for attribute in dir(grad_fn):
            if attribute.startswith("_raw_saved_"):
                saved = getattr(grad_fn, attribute)
                if isinstance(saved, tuple):
                    continue
                node.saves = True
                node.recomputed = type(saved.data).__name__ == "_Holder"
                break
    return node


def _axis(softmax: Any, rank: int) -> int | None:
    """Returns over which axis a softmax goes, from 0; `None` where its node does not say."""
    axis = getattr(softmax, "_saved_dim", None)
    if not isinstance(axis, int) or not rank:
        return None
    return (axis - UNSIGNED if axis >= UNSIGNED // 2 else axis) % rank


def _plain(name: str) -> str:
    """`AddmmBackward0` to `Addmm`; a custom function keeps its name."""
    return name.rpartition("Backward")[0] if name.rpartition("Backward")[2].isdigit() else name


def behind_views(op: Node) -> list[Node]:
    """Returns what an operation's inputs were computed by, whatever views of them were taken."""
    found: list[Node] = []
    pending = list(op.inputs)
    while pending:
        node = pending.pop()
        if node.is_op or node.leaf:
            found.append(node)
        else:
            pending += node.inputs
    return found


def views_for(nodes: Iterable[Node], counted: Iterable[Node]) -> list[Node]:
    """Returns the views that nothing but the counted operations use, directly or through other views of
    theirs: a slice of a turn goes with the turn."""
    inside = {id(op) for op in counted}
    views: list[Node] = []
    # A view is made before what uses it.
    for node in sorted((n for n in nodes if not n.is_op and not n.leaf), key=lambda n: -n.sequence):
        if node.users and all(id(user) in inside for user in node.users):
            views.append(node)
            inside.add(id(node))
    return views


def is_small(op: Node) -> bool:
    """Whether an operation has a result of a few thousand numbers, and few multiplications to get there."""
    return op.numel <= SMALL_ELEMENTS and op.flops <= SMALL_FLOPS and op.item_bytes > 0
