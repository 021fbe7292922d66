"""Which objects a function tells what a model has chosen without gradients, to be answered by them.

Whoever is told what was chosen, gives what the next choice is made of, and answers something that is kept
together with the choice, is an environment, whatever it and its methods are called: `rewards =
buildings.act(floors)` after `floors = choose(buildings.view())`. What scores predictions gives the model
nothing, a decoder that goes on with what it was told answers nothing that is kept, and a memory of
experience answers nothing at all.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from diagnose.source.parts import Part
from diagnose.source.statements import (
    MODULES,
    callee,
    calls_of,
    given_to,
    header_lines,
    nodes_of,
    reads,
    words,
    writes,
)

BOOKS = {"log", "logger", "logging", "wandb", "writer", "tracker", "metrics", "meter", "print"}
"""Words of what is told for the record."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An environment, as one function uses it.

    Attributes:
        tells: The statement that tells it what was chosen.
        chooses: The statements on the way from what it gives to what it is told, the model's calls among
            them.
        base: What it is called there.
    """

    tells: ast.stmt
    chooses: tuple[ast.stmt, ...]
    base: str

    def methods(self, statement: ast.stmt) -> set[str]:
        """Returns the methods of the environment that a statement calls."""
        called = map(callee, calls_of(statement))
        return {name for name, base in called if base == self.base}


def exchange_in(part: Part, lines: Collection[int], learns: Collection[int]) -> Exchange | None:
    """Returns the environment that a function acts in; `None` where there is none.

    Args:
        part: The function.
        lines: Its lines through which models are called without gradients.
        learns: Its lines from which models are called with gradients, and backward passes begun.
    """
    for chooses in part.statements:
        if not writes(chooses) or not set(lines) & set(header_lines(chooses)):
            continue
        seen = set().union(
            *(reads(ast.Expr(value)) for call in calls_of(chooses) for value in given_to(call))
        )
        found, _ = part.walk([(chooses, seen)])
        fed = [s for s in part.statements if id(s) in found] + [chooses]
        reached = part.derived([chooses])
        for tells in part.statements:
            if id(tells) not in reached or tells is chooses or not isinstance(tells, ast.Assign):
                continue
            if set(learns) & set(header_lines(tells)):
                continue
            chosen = set().union(*part.spread({id(chooses): writes(chooses)}, {id(tells)}).values())
            for base in _told(tells, chosen, part):
                if all(callee(call)[1] == base for call in calls_of(chooses)):
                    continue  # the environment itself
                gives = any(callee(call)[1] == base for s in fed if s is not tells for call in calls_of(s))
                answers = tells in fed and len(writes(tells)) > 1
                kept = _kept(part, (chooses, tells))
                answer = set().union(*part.derived([tells]).values())
                if (gives or answers) and kept & chosen and kept & answer:
                    way, _ = part.walk([(tells, part.reads[id(tells)])])
                    return Exchange(tells, tuple(_choosing(part, way, lines, base)), base)
    return None


def _choosing(part: Part, way: Collection[int], lines: Collection[int], base: str) -> Iterator[ast.stmt]:
    """Yields the statements on a way in which time passed without gradients, but in the environment."""
    for statement in part.statements:
        if id(statement) not in way or not set(lines) & set(header_lines(statement)):
            continue
        if not all(callee(call)[1] == base for call in calls_of(statement)):
            yield statement


def _told(statement: ast.stmt, chosen: Collection[str], part: Part) -> list[str]:
    """Returns the objects whose methods a statement gives something that was chosen: no module's, nor what
    was chosen itself."""
    return [
        base
        for name, base in map(callee, calls_of(statement))
        if base.replace(".", "").isidentifier() and base != "self"
        if base.partition(".")[0] not in MODULES and base not in chosen
        if not part.effects.is_module(base) and not part.effects.computes(name)
        for call in calls_of(statement)
        if callee(call) == (name, base)
        if any(reads(ast.Expr(value)) & set(chosen) for value in given_to(call))
    ]


def _kept(part: Part, but: Collection[ast.stmt]) -> set[str]:
    """Returns the names of what a function puts somewhere, or gives back: not what it only counts, asks in
    a condition, or writes into a log."""
    kept: set[str] = set()
    for statement in part.statements:
        if statement in but or not _puts(statement):
            continue
        books = {word for call in calls_of(statement) for each in callee(call) for word in words(each)}
        if not books & BOOKS:
            kept |= reads(statement)
    return kept


def _puts(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Return, ast.Expr)):
        return True
    held = any("." in name or "[" in name for name in writes(statement))
    return held or any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes_of(statement))
