"""What a function does for the learning rate alone, where the script has written its schedule itself."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from diagnose.source.blocks import Blocks
from diagnose.source.flows import made_for
from diagnose.source.statements import Loop, Scope, names, statements_of

RATES = {"lr", "weight_decay", "momentum"}
"""What a schedule sets in an optimizer's groups of parameters."""


def sets_rate(statement: ast.stmt, loops: Sequence[Loop]) -> bool:
    """Whether a statement sets the rate of an optimizer's group of parameters: `group["lr"] = rate`.

    Args:
        statement: It.
        loops: Those around it.
    """
    groups = {
        name
        for loop in loops
        if not isinstance(loop, ast.While) and "param_groups" in names(ast.walk(loop.iter))
        for name in names(ast.walk(loop.target))
    }
    return any(names(ast.walk(target)) & {*groups, "param_groups"} for target in _rates(statement))


def _rates(statement: ast.stmt) -> list[ast.expr]:
    """Returns the containers of which a statement sets a rate."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    return [
        target.value
        for target in targets
        if isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value in RATES
    ]


def rates_of(function: Scope) -> frozenset[str]:
    """Returns the names of a function whose values become a rate of the optimizer's, and nothing else but
    something to be told or compared: `lr`, in `lr = rate_at(step)` before `group["lr"] = lr`."""
    statements = list(statements_of(function))
    if not any(map(_rates, statements)):
        return frozenset()
    blocks = Blocks(function)
    setters = {id(each) for each in statements if sets_rate(each, blocks.loops(each))}
    if not setters:
        return frozenset()
    return made_for(statements, lambda statement, name: id(statement) in setters)
