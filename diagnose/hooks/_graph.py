"""Walks an autograd graph once and adds up what its operations amount to.

Nothing that the graph saved is unpacked, and no node is kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import prod, sqrt
from time import perf_counter_ns
from typing import Any

from diagnose.core.graph import HEAVY_NS

MAX_NODES = 20_000
MAX_TIME_NS = 100_000_000
"""The walk is on the training thread, once: a tenth of a second is the most it may take."""

SMALL_ELEMENTS = 16_384
SMALL_FLOPS = 2e6
"""An operation below both computes for less time than it takes to be dispatched."""

SLOW_NS = 50_000
"""A node that takes longer in the backward pass computes, and is not only dispatched, however few numbers
it gives: the factors of many small matrices, say."""

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
POINTWISE_NAMES = """
    Abs Add Addcdiv Addcmul Clamp Cos Div Elu Erf Exp Gelu Hardswish LeakyRelu Log MaskedFill Mul
    Neg Pow Reciprocal Relu Rsqrt Sigmoid Silu Sin Softplus Sqrt Sub Tanh ToCopy Where
"""
POINTWISE = frozenset(POINTWISE_NAMES.split())
REGION = "CheckpointFunctionBackward"
"""A checkpointed region of the older, reentrant kind."""
MAX_INNER = 4
"""Backward passes inside of one node that computes its forward again; a solver that goes step by step, as
the adjoint of a differential equation does, has more."""

FUSED_ATTENTION = "ScaledDotProduct"
ATTENTION_HOPS = 10
"""Operations between a softmax and its two products: scale, mask, dropout, and the views of `matmul`."""
SOFTMAXES = ("Softmax", "SafeSoftmax")
NORMALIZER_HOPS = 4
"""Operations between an exponential, its sum and the division by that: a mask, a small number, views."""


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


def _plain(name: str) -> str:
    """`AddmmBackward0` to `Addmm`; a custom function keeps its name."""
    return name.rpartition("Backward")[0] if name.rpartition("Backward")[2].isdigit() else name


def summarize(nodes: list[Node], truncated: bool, wanted: Collection[int]) -> dict[str, Any]:
    """Returns the facts of `core.graph.Graph`.

    Args:
        nodes: From `walk`.
        truncated: Likewise.
        wanted: Identities of the parameters that an optimizer updates; empty when none is known.
    """
    ops = [node for node in nodes if node.is_op]
    attention, keys = written_out_attention(ops)
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
    heavy = [op for op in ops if op.forward_ns >= HEAVY_NS]
    saving = [op for op in ops if op.saves]
    products = [op for op in ops if op.flops]
    whole = sum(op.cost for op in saving)
    return {
        "num_nodes": len(nodes),
        "truncated": truncated,
        "names": dict(Counter(node.name for node in nodes).most_common(40)),
        "total": work_of(nodes),
        "convolutions": _work([op for op in ops if op.name.startswith("Convolution")]),
        "small_ops": _work(small),
        "double": _work([op for op in ops if op.double and _computes(op)]),
        "heavy": _work(heavy) if any(op.backward_ns is not None for op in ops) else None,
        "small_depth": longest_chain(nodes, {id(op) for op in small}),
        "product_bytes": max(products, key=lambda op: op.flops).item_bytes if products else None,
        "product_rows": most_rows(ops),
        "attention": _work(attention),
        "attention_products": _work([op for op in attention if op.name in MATMULS]),
        "num_attentions": len(keys),
        "fused_attention": _work([op for op in ops if op.name.startswith(FUSED_ATTENTION)]),
        "attention_keys": max(keys, default=None),
        "attention_drops": any(op.name == "Mul" or "Dropout" in op.name for op in dropped_weights(ops)),
        "pointwise": _work(chained),
        "unaligned": _work([op for op in ops if op.flops and _is_unaligned(op)]),
        "unwanted": unwanted,
        "num_unwanted_tensors": sum(leaf.leaf not in wanted for leaf in leaves) if knows else 0,
        "num_unreached_tensors": len(set(wanted) - {leaf.leaf for leaf in leaves}) if knows else 0,
        "recomputed_share": sum(op.cost for op in saving if op.recomputed) / whole if whole else 0.0,
        "num_checkpoints": sum(node.is_region for node in nodes),
        "regions": _work([node for node in nodes if node.is_region]),
        "second_order": any(node.second for node in nodes),
        "has_dropout": any("Dropout" in node.name for node in nodes),
    }


def is_small(op: Node) -> bool:
    """Whether an operation has a result of a few thousand numbers, and few multiplications to get there."""
    return op.numel <= SMALL_ELEMENTS and op.flops <= SMALL_FLOPS and op.item_bytes > 0


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


def written_out_attention(ops: list[Node]) -> tuple[list[Node], list[int]]:
    """Returns the operations of each softmax between two batched products, products included, and over how
    many keys each of these softmaxes goes."""
    found: dict[int, Node] = {}
    keys: list[int] = []
    for softmax in ops:
        if len(softmax.shape) < 3 or not (softmax.name in SOFTMAXES or _is_normalized(softmax)):
            continue
        below = _until_product(softmax, up=False)
        above = _until_product(softmax, up=True)
        if below and above:
            keys.append(softmax.shape[-1])
            found.update((id(op), op) for op in (softmax, *below, *above) if op.is_op)
    return list(found.values()), keys


def dropped_weights(ops: list[Node]) -> list[Node]:
    """Returns what is done to the weights of written-out attention after the softmax: a CPU's dropout is a
    product with a mask."""
    found: list[Node] = []
    for softmax in ops:
        is_wide = softmax.name in SOFTMAXES and len(softmax.shape) > 2
        if is_wide and _until_product(softmax, up=False):
            found += [op for op in _until_product(softmax, up=True) if op.numel == softmax.numel]
    return [op for op in found if op.is_op and op.name not in MATMULS]


def _is_normalized(exp: Node) -> bool:
    """Whether an exponential is a softmax that is written out: divided by its sums over the keys, or of a
    difference to the logarithm of these."""
    if exp.name != "Exp":
        return False
    for before in exp.inputs:
        if before.name == "LogSoftmax":
            return True
        if before.name == "Sub" and any(node.name == "Logsumexp" for node in behind_views(before)):
            return True
    sums = [
        user
        for node in _following(exp, lambda node: node.numel == exp.numel)
        for user in node.users
        if user.name == "Sum" and user.numel * exp.shape[-1] == exp.numel
    ]
    return any(
        user.name == "Div"
        for each in sums
        for node in _following(each, lambda node: node.name != "Div")
        for user in node.users
    )


def _following(begin: Node, passes: Callable[[Node], bool]) -> list[Node]:
    """Returns a node and those that few operations make of it, as long as each of them passes."""
    found, edge = [begin], [begin]
    for _ in range(NORMALIZER_HOPS):
        edge = [user for node in edge for user in node.users if user not in found and passes(user)]
        found += edge
    return found


def _until_product(softmax: Node, *, up: bool) -> list[Node]:
    """The operations on the scores on one side of the softmax, with the product; empty without one."""
    passed: list[Node] = []
    edge = [softmax]
    product: list[Node] = []
    for _ in range(ATTENTION_HOPS):
        following: list[Node] = []
        for node in edge:
            for neighbour in node.users if up else node.inputs:
                found = _product(neighbour, softmax, up=up)
                product = found or product
                if neighbour.numel == softmax.numel and not neighbour.leaf and not found:
                    following.append(neighbour)
        passed += [node for node in following if node not in passed]
        if product:
            return [*passed, *product]
        edge = following
    return []


def _product(node: Node, softmax: Node, *, up: bool) -> list[Node]:
    """Returns the operations of a product of batches that begins at a node on one side of the softmax: one,
    or the sums of what is multiplied number by number."""
    if node.name in ("Bmm", "Baddbmm"):
        return [node] if up or node.numel == softmax.numel else []
    if up and node.name == "Mul" and node.numel > softmax.numel:
        return [node, *(user for user in node.users if user.name == "Sum")] if _is_summed(node) else []
    if not up and node.name == "Sum" and node.numel == softmax.numel:
        factors = [each for each in node.inputs if each.name == "Mul" and each.numel > node.numel]
        return [*factors, node] if factors else []
    return []


def _is_summed(node: Node) -> bool:
    return any(user.name == "Sum" and user.numel < node.numel for user in node.users)
