"""How many operations on whole tensors the statements of a function do."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from diagnose.source.calling import callee, calls_in, is_call
from diagnose.source.kinds import Comprehension, Function
from diagnose.source.names import last_name
from diagnose.source.reads_writes import closure, in_place
from diagnose.source.statements import assigned, nodes_of, statements_of

ELEMENTWISE_NAMES = """
    abs add addcdiv addcmul clamp clamp_max clamp_min clip copysign div exp lerp log maximum minimum mul
    neg norm pow reciprocal rsqrt sgn sigmoid sign sqrt square sub tanh where
"""
ELEMENTWISE = frozenset(ELEMENTWISE_NAMES.split())
"""Methods, and functions of torch, that go through all of a tensor. So do those that change it in place."""

NUMBERS = frozenset({"item", "float", "int", "len", "numel", "size", "dim", "get"})
"""What is not a tensor of what it is asked of."""

PRODUCTS = frozenset({"matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "tensordot"})
"""Beside one of these the memory is not what takes the time."""

AT_ONCE = ("_foreach_", "_fused_")
"""Begins the names of torch's functions that take a list of tensors."""

MARKS = frozenset({"detach", "detach_", "requires_grad_"})
"""Methods that take no time to speak of, however large a tensor is."""


def operations_by_statement(function: Function | None) -> dict[int, int]:
    """Returns how many elementwise operations on tensors each statement does, by its identity.

    A tensor is what such a method is called on, what has a gradient, and what is computed of one. Numbers
    may be computed beside: `rate = lr / (1 - beta**t)` is no operation.
    """
    statements = list(statements_of(function))
    held = {text for statement in statements for text in _told(nodes_of(statement))}
    pairs = [pair for statement in statements for pair in assigned(statement)]
    closure(held, lambda known: (ast.unparse(target) for target, value in pairs if _holds(value, known)))
    return {id(statement): _count(statement, held) for statement in statements}


def is_at_once(nodes: Collection[ast.AST]) -> bool:
    """Whether torch is given all tensors in one call, and what it gives is not gone through one by one:
    `[f(t) for t in torch._foreach_sub(a, b)]`."""
    return any(map(takes_lists, nodes)) and not any(map(_takes_turns, nodes))


def takes_lists(node: ast.AST) -> bool:
    """Whether it is a call of torch's for lists of tensors, and not for one tensor alone: `[p]`."""
    if not isinstance(node, ast.Call) or not last_name(node.func).startswith(AT_ONCE):
        return False
    first = node.args[0] if node.args else None
    if not isinstance(first, ast.List) or len(first.elts) != 1:
        return True
    return isinstance(first.elts[0], ast.Starred)


def _takes_turns(node: ast.AST) -> bool:
    """Whether it is a comprehension around such a call that calls something else in each turn."""
    if not isinstance(node, Comprehension) or not any(map(takes_lists, ast.walk(node))):
        return False
    turn = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    return not all(is_call(call, MARKS) or takes_lists(call) for call in calls_in(*turn))


def _count(statement: ast.stmt, held: set[str]) -> int:
    nodes = nodes_of(statement)
    if any(map(is_product, nodes)):
        return 0
    operators = [node for node in nodes if isinstance(node, ast.BinOp) and _holds(node, held)]
    added = isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) in held
    return sum(map(is_elementwise, nodes)) + len(operators) + added


def is_product(node: ast.AST) -> bool:
    """Whether matrices are multiplied, or factored."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call):
        return False
    name, base = callee(node)
    return name in PRODUCTS or base.endswith("linalg")


def _told(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields what is a tensor by what is done to it."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            yield ast.unparse(node)
            yield ast.unparse(node.value)
        if not is_elementwise(node):
            continue
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        of_torch = ast.unparse(node.func.value) == "torch"
        for value in node.args if of_torch else [node.func.value]:
            if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
                yield ast.unparse(value)


def is_elementwise(node: ast.AST) -> bool:
    """Whether it calls one of torch's operations that go through all of a tensor."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, base = callee(node)
    return base not in ("math", "np", "numpy") and (name in ELEMENTWISE or in_place(name))


def _holds(value: ast.expr, held: set[str]) -> bool:
    """Whether a tensor is in an expression, but for one that is only asked for a number."""
    pending: list[ast.AST] = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and ast.unparse(node) in held:
            return True
        if isinstance(node, ast.Subscript):
            if not isinstance(node.slice, ast.Constant):  # else an entry of what is kept: `state["step"]`
                pending.append(node.value)
        elif not is_call(node, NUMBERS):
            pending += ast.iter_child_nodes(node)
    return False
