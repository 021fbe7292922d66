"""Which names of a function are made for one purpose alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Sequence

from diagnose.source.calling import TRAINS, called_in
from diagnose.source.kinds import ForLoop, With
from diagnose.source.reads_writes import closure, reads, writes


def made_for(
    statements: Sequence[ast.stmt],
    serves: Callable[[ast.stmt, str], bool],
    given: Collection[str] = (),
) -> frozenset[str]:
    """Returns the names whose values serve a purpose and none besides, but to be told or compared.

    Args:
        serves: Whether a statement, which reads a name, uses it for that purpose.
        given: Names that count whatever else they serve.
    """
    readers: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for name in reads(statement):
            if name.isidentifier():
                readers.setdefault(name, []).append(statement)

    def more(found: set[str]) -> set[str]:
        return {name for name, users in readers.items() if _only_serves(name, users, found, serves)}

    return frozenset(closure(set(given), more))


def _only_serves(
    name: str, users: Iterable[ast.stmt], found: set[str], serves: Callable[[ast.stmt, str], bool]
) -> bool:
    needed = False
    for user in users:
        if serves(user, name) or makes_only(user, found - {name}):
            needed = True
        elif not makes_only(user, {*found, name}) and not _tells(user):
            return False
    return needed


def makes_only(statement: ast.stmt, wanted: Iterable[str]) -> bool:
    """Whether a statement assigns, or adds something to, such names and nothing else."""
    if isinstance(statement, (ForLoop, With)):
        return False
    made = writes(statement)
    return bool(made) and made <= set(wanted)


def _tells(statement: ast.stmt) -> bool:
    """Whether a statement makes nothing of what it reads: it prints it, or asks whether it is reached."""
    if isinstance(statement, (ast.If, ast.While, ast.Assert)):
        return True
    return isinstance(statement, ast.Expr) and not called_in(statement) & TRAINS
