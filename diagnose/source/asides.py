"""What the statement of a model call calls besides: for its arguments, or beside the model."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from diagnose.core.phases import Phase
from diagnose.source.calling import calls_in, calls_of, given_to, is_call
from diagnose.source.dependencies import Found
from diagnose.source.kinds import Loop
from diagnose.source.names import last_name, names
from diagnose.source.parts import Anchors, Part
from diagnose.source.reads_writes import writes
from diagnose.source.statements import all_lines, header_lines, nodes_of


def called_aside(part: Part, found: Found, statement: ast.stmt) -> dict[str, Phase]:
    """Returns what else the statement of a model call calls, or asks for as a property, by name: it gets
    nothing of the model's, as `loss_of(model(x), weights_of(y), self.scale)` shows of the last two. What is
    made of the batch is a part of it, and the rest is the loop's own. A term that is added, such as a
    penalty, is a part of the loss.
    """
    batch = _batch(_same_loop(part.statements, statement), part.anchors, found.roles)
    aside: dict[str, Phase] = {}
    around: set[str] = set()
    nodes = nodes_of(statement)
    terms = {id(side) for node in nodes if isinstance(node, ast.BinOp) for side in (node.left, node.right)}
    for node in nodes:
        if not isinstance(node, (ast.Call, ast.Attribute)):
            continue
        name = last_name(node.func if isinstance(node, ast.Call) else node)
        inside = [each for each in ast.walk(node) if each is not node]
        if any(isinstance(each, ast.Call) for each in inside) or id(node) in terms:
            around.add(name)
        else:
            of_batch = names(inside) & {each.rpartition(".")[2] for each in batch}
            aside.setdefault(name, Phase.DATA_WAIT if of_batch else Phase.OTHER)
    return {name: phase for name, phase in aside.items() if name not in around}


def called_for(statement: ast.stmt, leads: set[str]) -> set[str]:
    """Returns what a statement calls for the arguments of such functions, which call the model: `draw`, in
    `self.loss(*self.memory.draw())`."""
    calls = [call for call in calls_of(statement) if is_call(call, leads)]
    inner = (node for call in calls for node in calls_in(*given_to(call)))
    return {last_name(node.func) for node in inner} - leads


def _same_loop(statements: list[ast.stmt], inner: ast.stmt) -> list[ast.stmt]:
    """Returns the statements of the innermost loop around one, with its head; without a loop all."""
    around = [s for s in statements if isinstance(s, Loop) and inner.lineno in all_lines(s)]
    if not around:
        return statements
    lines = all_lines(max(around, key=lambda each: each.lineno))
    return [s for s in statements if s.lineno in lines]


def _batch(statements: list[ast.stmt], anchors: Anchors, roles: Mapping[int, Phase]) -> set[str]:
    """Returns the names that each step's batch is given, or what is made of it."""
    made = (
        writes(s)
        for s in statements
        if anchors.next.intersection(header_lines(s)) or roles.get(s.lineno) is Phase.DATA_WAIT
    )
    return set().union(*made)
