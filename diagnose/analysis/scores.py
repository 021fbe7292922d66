"""What of a model's results is neither the loss nor a batch: who works on that scores them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from diagnose.analysis.dependencies import Dependencies, Found, Links
from diagnose.analysis.effects import methods_called, rebased
from diagnose.analysis.parts import Part
from diagnose.analysis.statements import (
    callee,
    expressions,
    grow,
    header_lines,
    key_of,
    nodes_of,
    reads,
    writes,
)
from diagnose.core.phases import Phase

ARITHMETIC = {"mean", "sum", "item", "detach", "float", "stack", "div", "mul", "add"}
"""Calls beside which a statement still only adds up terms of a loss."""

CHAIN = 4
"""Functions that call each other, at most, through which needs are followed."""


class Scores:
    """Answers for one function of the loop what holds results of its models.

    Args:
        part: The function.
        found: What its statements are for.
        links: What the functions of the loop leave for each other.

    Attributes:
        losses: The names of the loss, and of the terms that it is the sum of.
    """

    def __init__(self, part: Part, found: Found, links: Links) -> None:
        self._part = part
        self._found = found
        self._links = links
        self.losses = self._losses()

    def results(self) -> dict[int, set[str]]:
        """Returns by line the names that hold there what models have computed, or what is made of it, but
        for the loss."""
        part = self._part
        held: dict[int, set[str]] = {}
        for statement in part.models:
            own = set() if statement in part.passes else writes(statement)
            held[id(statement)] = (own | self._left_by(statement)) - self.losses
        aside = {id(s) for s in part.statements if s.lineno in self._found.roles}
        aside |= self._found.carried | part.hooked
        aside |= part.walk([(s, part.reads[id(s)]) for s in part.models])[0].keys()  # another model's
        held = part.spread(held, aside)
        return {
            line: {
                name
                for source in part.statements
                for name in held.get(id(source), ())
                if part.blocks.reaches(source, name, statement)
            }
            for statement in part.statements
            if id(statement) not in aside and not isinstance(statement, (ast.Raise, ast.Assert))
            for line in header_lines(statement)
        }

    def results_in_object(self) -> set[str]:
        """Returns the attributes that hold results of models when the function returns."""
        own = set().union(*(writes(s) | self._left_by(s) for s in self._part.models))
        grow(own, [s for s in self._part.statements if s.lineno not in self._found.roles])
        return {name for name in own - self.losses if name.startswith("self.")}

    def made_of(self) -> set[str]:
        """Returns the names of that which batches are made of, such as a replay memory."""
        part, roles = self._part, self._found.roles
        makes = [s for s in part.statements if s in part.asks or roles.get(s.lineno) is Phase.DATA_WAIT]
        given = (
            ast.Expr(value)
            for s in part.calls
            for node in nodes_of(s)
            if isinstance(node, ast.Call)
            for value in (*node.args, *(keyword.value for keyword in node.keywords))
        )
        used = set().union(*(reads(s) for s in (*makes, *given)))
        return used - set().union(*(writes(s) for s in (*makes, *part.calls) if self._in_each_step(s)))

    def _losses(self) -> set[str]:
        part, roles = self._part, self._found.roles
        returns = (s for s in part.statements if isinstance(s, ast.Return) and not _is_tuple(s))
        ends = part.passes or list(returns)
        losses = set().union(*(part.wanted(s, self._links.losses) for s in ends))
        sums = [s for s in part.statements if (id(s) in part.hooked or s.lineno in roles) and _adds_up(s)]
        grew = True
        while grew:
            more = set().union(*(_terms(s) for s in sums if writes(s) & losses)) - losses
            grew = bool(more)
            losses |= more
        return losses

    def _left_by(self, statement: ast.stmt) -> set[str]:
        """Returns the results that a method leaves in its object."""
        left: set[str] = set()
        for name, base in methods_called(statement):
            left |= rebased(self._links.results.get(name, ()), base)
        return left

    def _in_each_step(self, statement: ast.stmt) -> bool:
        """Whether a statement is in the loop that trains; all are where the function has none."""
        blocks = self._part.blocks
        around = [loops for s in (*self._part.calls, *self._part.asks) if (loops := blocks.loops(s))]
        return not around or any(loops[0] in blocks.loops(statement) for loops in around)


def links_of(parts: Sequence[Part]) -> Links:
    """Returns what the functions of the loop leave for each other."""
    links = Links()
    for _ in range(CHAIN):
        after = Links()
        for part in parts:
            found = Dependencies(part, links).found()
            scores = Scores(part, found, links)
            passed = {
                "batch": found.batch,
                "loss": found.loss,
                "losses": {name for name in scores.losses if name.startswith("self.")},
                "results": scores.results_in_object(),
            }
            for kind, told in passed.items():
                by_name: dict[str, set[str]] = getattr(after, kind)
                by_name[part.name] = by_name.get(part.name, set()) | told
        if after == links:
            break
        links = after
    return links


def _is_tuple(statement: ast.Return) -> bool:
    return isinstance(statement.value, ast.Tuple)


def _terms(statement: ast.stmt) -> set[str]:
    """Returns what a statement reads, each as closely as it says: `out.loss` is not all of `out`."""
    terms = {ast.unparse(statement.target)} if isinstance(statement, ast.AugAssign) else set()
    pending: list[ast.AST] = list(expressions(statement))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Subscript) and (key := key_of(node)) is not None:
            terms.add(f"{ast.unparse(node.value)}[{key}]")
        elif isinstance(node, (ast.Name, ast.Attribute)):
            terms.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            pending += [node.func.value, *node.args]
        else:
            pending += ast.iter_child_nodes(node)
    return terms


def _adds_up(statement: ast.stmt) -> bool:
    """Whether a statement only adds up what it reads, or brings it to Python."""
    calls = [node for node in nodes_of(statement) if isinstance(node, ast.Call)]
    return all(callee(call)[0] in ARITHMETIC for call in calls)
