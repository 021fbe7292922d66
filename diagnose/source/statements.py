"""Statements and what they are made of, what they assign to, and the lines that they occupy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeGuard

from diagnose.source.kinds import Comprehension, Definition, Function, Scope, Separate


def functions_of(tree: ast.Module) -> Iterator[Scope]:
    yield tree
    for node in nodes_within(tree):
        if isinstance(node, Definition):
            yield node


def innermost_of(functions: list[Scope], line: int) -> int:
    """Returns the index of the innermost function that holds a line; 0 is the module."""
    best, span = 0, float("inf")
    for index, function in enumerate(functions):
        lines = range(0) if isinstance(function, ast.Module) else all_lines(function)
        if line in lines and len(lines) < span:
            best, span = index, len(lines)
    return best


def statements_of(function: Scope | Function | None) -> Iterator[ast.stmt]:
    """Yields the statements of a function, of every depth, but not those of functions inside it; of a
    lambda, and of none, nothing."""
    pending = [] if function is None or isinstance(function, ast.Lambda) else list(function.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, Separate):
            continue
        yield statement
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.stmt):
                        pending.append(item)
                    elif isinstance(item, (ast.ExceptHandler, ast.match_case)):
                        pending.extend(item.body)


def statements_in(node: ast.AST) -> list[ast.stmt]:
    """Returns a node, if it is a statement, and the statements in it, those of functions inside it too."""
    return [each for each in ast.walk(node) if isinstance(each, ast.stmt)]


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yields a statement's own expressions, without those of statements in it."""
    for _, value in ast.iter_fields(statement):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.expr):
                yield item
            elif isinstance(item, ast.withitem):
                yield item.context_expr


@lru_cache(maxsize=5_000)  # each line that is asked about asks for those of all statements around it
def nodes_of(statement: ast.stmt) -> tuple[ast.AST, ...]:
    """Returns all that a statement's own expressions are made of."""
    return tuple(node for expression in expressions(statement) for node in ast.walk(expression))


@lru_cache(maxsize=200)
def nodes_within(node: ast.AST) -> tuple[ast.AST, ...]:
    """Returns a node and all that it is made of, as `ast.walk` does."""
    return tuple(ast.walk(node))


def all_lines(node: ast.stmt | ast.expr) -> range:
    """Returns the lines that a node occupies, with all that is in it."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def header_lines(statement: ast.stmt) -> range:
    """Returns the lines that a statement itself occupies, without those of the statements in it."""
    inner = [node.lineno for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
    if inner:
        return range(statement.lineno, max(statement.lineno + 1, min(inner)))
    return all_lines(statement)


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """Returns what a statement assigns to; nothing of one that assigns nothing."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, (ast.AugAssign, ast.AnnAssign)) else []


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields what is assigned to, and what to it; of `a, b = c, d` one by one."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def element_of(comprehension: Comprehension) -> ast.expr:
    """Returns what a comprehension makes in each turn; of a dictionary's, the value."""
    return comprehension.value if isinstance(comprehension, ast.DictComp) else comprehension.elt


def is_operation(node: ast.AST | None, *operators: type[ast.operator]) -> TypeGuard[ast.BinOp]:
    """Whether a node is one of such operations on two operands."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, operators)


def text_of(node: ast.AST | None) -> str | None:
    """Returns a text that is written out; `None` of all else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def yields(statement: ast.stmt) -> bool:
    """Whether a statement's own expressions yield anything."""
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes_of(statement))
