"""What the methods of a script's classes assign to their objects: `self.load()` may make the batch as
`x = load()` does."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from diagnose.analysis.statements import callee, nodes_of, statements_of, writes

Method = ast.FunctionDef | ast.AsyncFunctionDef


class Effects:
    """Answers what a statement assigns, by itself and through the methods that it calls.

    Methods are known by their names alone: two of one name assign what either does.

    Args:
        trees: Parsed files.
    """

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self._assigned: dict[str, set[str]] = {}
        calls: dict[str, set[str]] = {}
        for method in (each for tree in trees for each in _methods(tree)):
            statements = list(statements_of(method))
            own = self._assigned.setdefault(method.name, set())
            own.update(name for s in statements for name in writes(s) if name.startswith("self."))
            called = calls.setdefault(method.name, set())
            called.update(name for s in statements for name, base in methods_called(s) if base == "self")
        grew = True
        while grew:
            before = sum(map(len, self._assigned.values()))
            for name, called in calls.items():
                self._assigned[name].update(*(self._assigned.get(each, ()) for each in called))
            grew = sum(map(len, self._assigned.values())) > before

    def writes(self, statement: ast.stmt) -> set[str]:
        """Returns the names, dotted names and containers that a statement assigns, or appends to."""
        found = writes(statement)
        for name, base in methods_called(statement):
            found.update(rebased(self._assigned.get(name, ()), base))
        return found


def rebased(names: Iterable[str], base: str) -> set[str]:
    """Returns what a method calls `self.batch` by the name that its caller has for the object."""
    return {base + name.removeprefix("self") for name in names} if base else set()


def methods_called(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yields the methods that a statement calls, and on what: `("load", "self")`."""
    for node in nodes_of(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield callee(node)


def _methods(tree: ast.Module) -> Iterator[Method]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and child.name != "__init__":
                    yield child
