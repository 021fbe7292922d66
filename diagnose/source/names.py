"""Names in expressions, and the words that they are made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache


def last_name(node: ast.AST | None) -> str:
    """Returns the name of a variable, or of an attribute without what this is of; empty for all else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def names(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names and attributes among nodes."""
    return {last_name(node) for node in nodes} - {""}


def names_in(*nodes: ast.AST) -> set[str]:
    """Returns the names and attributes in nodes."""
    return names(each for node in nodes for each in ast.walk(node))


def variables(nodes: Iterable[ast.AST], context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Returns the variables among nodes; with a context only those that are read, or written."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


@cache
def words(name: str) -> frozenset[str]:
    """Returns the words of a name, in small letters: `logMetrics_v2` has log, metrics and v2."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name))


def words_of(all_names: Iterable[str]) -> set[str]:
    """Returns the words of several names."""
    return {word for name in all_names for word in words(name)}
