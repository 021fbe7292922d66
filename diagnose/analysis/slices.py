"""Whether a statement in a loop does to a tensor, turn by turn, what one operation or kernel could do."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def takes_slices(statement: ast.stmt, loops: Sequence[ast.stmt], nodes: Sequence[ast.AST]) -> bool:
    """Whether a loop's variable is one of several indices, or says which rows are taken, and one operation
    could do all turns.

    That is not so where a turn reads what the one before has written, or calls a part of a model.

    Args:
        statement: In the loop.
        loops: Those around it.
        nodes: Of the statement's own expressions.
    """
    around = [loop.target for loop in loops if isinstance(loop, (ast.For, ast.AsyncFor))]
    targets = [*around, *(node.target for node in nodes if isinstance(node, ast.comprehension))]
    variables = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    reads = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    writes = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    if isinstance(statement, ast.AugAssign) or reads & writes - variables:
        return False
    if any(isinstance(node, ast.Call) and _may_be_module(node.func) for node in nodes):
        return False
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, (ast.Tuple, ast.Compare))  # `x[:, i]`, or a group: `x[group == i]`
        and any(isinstance(inner, ast.Name) and inner.id in variables for inner in ast.walk(node.slice))
        for node in nodes
    )


ELEMENTWISE_NAMES = """
    abs add ceil clamp clip cos div erf exp flip float floor fmod ge gelu gt le lerp log log1p lt
    masked_fill maximum minimum mul neg pow reciprocal relu remainder roll round rsqrt sigmoid sign silu
    sin softplus sqrt square sub tanh where
"""
ELEMENTWISE = frozenset(ELEMENTWISE_NAMES.split())


def is_chain(statement: ast.stmt, loops: Sequence[ast.stmt], nodes: Sequence[ast.AST]) -> bool:
    """Whether each turn of a loop puts further elementwise operations on the result of the one before.

    A compiler makes one kernel of them all. Of products it could not, nor of layers.

    Args:
        statement: In the loop.
        loops: Those around it.
        nodes: Of the statement's own expressions.
    """
    if not loops or not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    written = {target.id for target in targets if isinstance(target, ast.Name)}
    reads = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return (
        bool(written & reads or isinstance(statement, ast.AugAssign))
        and bool(calls)
        and all(isinstance(call.func, ast.Attribute) and call.func.attr in ELEMENTWISE for call in calls)
        and not any(isinstance(node, ast.MatMult) for node in nodes)
    )


def _may_be_module(function: ast.expr) -> bool:
    """Whether `function` is neither a library's nor a tensor's or list's method: `cell`, `self.cell`."""
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.value.id == "self"
    return True
