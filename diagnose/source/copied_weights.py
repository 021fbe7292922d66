"""Which statements take the values of weights out of torch, to write them to a file by hand."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable

from diagnose.source.calling import is_call
from diagnose.source.kinds import Scope
from diagnose.source.names import names_in
from diagnose.source.reads_writes import writes
from diagnose.source.statements import nodes_of, statements_of
from diagnose.source.weight_words import ASKED, GRADIENTS, KEEPS, RESHAPES

COPIES = {"tobytes", "tofile", "tolist"}
"""Methods that give, or write, all values of what they are called on."""

STILL_VALUES = {*KEEPS, *RESHAPES, "numpy", "contiguous", "data", "half", "bfloat16", "astype"}
"""What may stand between a weight and one of these. A norm or a gradient is no weight."""


def copies_weights(node: ast.AST, over: Iterable[tuple[ast.expr, ast.expr]]) -> bool:
    """Whether values of weights are taken somewhere in a node, `p.detach().numpy().tobytes()`, by variables
    of loops, which are given with what each goes over."""
    taken = [
        each.func.value
        for each in ast.walk(node)
        if is_call(each, COPIES) and isinstance(each.func, ast.Attribute)
    ]
    turns = {
        name
        for target, source in (over if taken else ())
        if (asked := names_in(source)) & ASKED and not asked & GRADIENTS
        for name in names_in(target)
    }
    return any(_is_value_of(value, turns) for value in taken)


def copied_in(function: Scope, texts: Collection[str]) -> frozenset[str]:
    """Returns the names of a function that hold values of weights on their way to a file, `weights` of
    `json.dump(weights, file)`, among its names of what is made for that alone."""
    found: set[str] = set()
    for statement in statements_of(function) if texts else ():
        made, nodes = writes(statement), nodes_of(statement)
        over = [(node.target, node.iter) for node in nodes if isinstance(node, ast.comprehension)]
        if made and made <= set(texts) and over and copies_weights(statement, over):
            found |= made
    return frozenset(found)


def _is_value_of(value: ast.expr, turns: Collection[str]) -> bool:
    """Whether an expression is a weight, one of the variables, or a copy of its values."""
    while isinstance(value, (ast.Call, ast.Attribute)):
        if isinstance(value, ast.Call):
            value = value.func
        elif value.attr in STILL_VALUES:
            value = value.value
        else:
            return False
    return isinstance(value, ast.Name) and value.id in turns
