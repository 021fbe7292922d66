"""Finds attention that is written out in operations of its own, by the shape of an autograd graph."""

from __future__ import annotations

from collections.abc import Callable

from diagnose.hooks._graph import MATMULS, Node, behind_views

ATTENTION_HOPS = 10
"""Operations between a softmax and its two products: scale, mask, dropout, and the views of `matmul`."""
SOFTMAXES = ("Softmax", "SafeSoftmax")
BIASED = ("Add", "Baddbmm")
"""Operations by which a bias, such as one of relative positions, gets into the scores."""
COPIES = ("Clone", "ToCopy")
"""Of a factor in another order or type."""
NORMALIZER_HOPS = 4
"""Operations between an exponential, its sum and the division by that: a mask, a small number, views."""


def written_out_attention(ops: list[Node]) -> tuple[list[Node], list[Node]]:
    """Returns the operations of each softmax between two batched products, products included, and these
    softmaxes.

    What no fused kernel would compute is none: weights that something else reads, too, and products with a
    parameter, such as those of a router with its experts, or a softmax over another axis than the keys.
    Of a single query or key there is next to nothing between the products.
    """
    found: dict[int, Node] = {}
    places: list[Node] = []
    for softmax in ops:
        if len(softmax.shape) < 3 or not (softmax.name in SOFTMAXES or _is_normalized(softmax)):
            continue
        if softmax.axis not in (None, len(softmax.shape) - 1):
            continue
        below = _until_product(softmax, up=False)
        above = _until_product(softmax, up=True)
        if not (below and above) or 1 in softmax.shape[-2:] or any(map(_is_with_weight, below)):
            continue
        if softmax.name in SOFTMAXES and _is_read_elsewhere(softmax, above):
            continue
        places.append(softmax)
        found.update((id(op), op) for op in (softmax, *below, *above) if op.is_op)
    return list(found.values()), places


def has_trained_bias(attention: list[Node]) -> bool:
    """Whether something with a gradient of its own is added to the scores of written-out attention."""
    return any(len(op.inputs) > (2 if op.name == "Baddbmm" else 1) for op in attention if op.name in BIASED)


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
                product += [node for node in found if node not in product]
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


def _is_with_weight(op: Node) -> bool:
    """Whether a product's second factor is a parameter: then it is a layer, and the softmax one of classes,
    of experts, or of features."""
    factors = [view for view in op.inputs if len(view.shape) > 2]
    if op.name not in ("Bmm", "Baddbmm") or not factors:
        return False
    while factors[-1].inputs and (not factors[-1].is_op or factors[-1].name in COPIES):
        factors.append(factors[-1].inputs[0])
    return bool(factors[-1].leaf and factors[-1].weight)


def _is_read_elsewhere(softmax: Node, above: list[Node]) -> bool:
    """Whether anything but the product with the values reads the weights, such as a loss on them."""
    passed = [
        softmax,
        *(node for node in above if node.numel == softmax.numel and node.name not in MATMULS),
    ]
    return any(user not in above for node in passed for user in node.users)


def _is_summed(node: Node) -> bool:
    return any(user.name == "Sum" and user.numel < node.numel for user in node.users)
