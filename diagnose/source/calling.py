"""What calls are of, what they are given, and who holds what they return."""

from __future__ import annotations

import ast
from collections.abc import Container
from typing import TypeGuard

from diagnose.source.kinds import Function
from diagnose.source.names import last_name
from diagnose.source.statements import assigned, nodes_of, nodes_within

TRAINS = {"backward", "step"}
"""Methods by which a script trains."""


def calls_of(statement: ast.stmt) -> list[ast.Call]:
    """Returns the calls in a statement's own expressions."""
    return [node for node in nodes_of(statement) if isinstance(node, ast.Call)]


def calls_in(*nodes: ast.AST) -> list[ast.Call]:
    """Returns the calls in nodes, those in statements inside them too."""
    return [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Call)]


def called_in(statement: ast.stmt) -> set[str]:
    """Returns the names of what is called in a statement's own expressions."""
    return {last_name(call.func) for call in calls_of(statement)}


def callee(call: ast.Call) -> tuple[str, str]:
    """Returns what is called and on what: `("item", "loss")`; the latter is only a hint."""
    base = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return last_name(call.func), base


def is_call(node: ast.AST | None, called: Container[str]) -> TypeGuard[ast.Call]:
    """Whether a node calls a function or a method of such a name."""
    return isinstance(node, ast.Call) and last_name(node.func) in called


def given_to(call: ast.Call) -> list[ast.expr]:
    """Returns what a call is given, by place or by name."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """Returns what a call is given by a name."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def parameters_of(function: Function) -> list[str]:
    """Returns the parameters of a function that are given by place."""
    return [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]


def bound(call: ast.Call, function: Function | None) -> list[tuple[str, ast.expr]]:
    """Returns the parameters of a function, other than its object, and what a call gives them; where it is
    not known, those that are named."""
    taken = parameters_of(function) if function is not None else []
    taken = taken[1:] if taken[:1] in (["self"], ["cls"]) else taken
    named = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
    return [*zip(taken, call.args, strict=False), *named]


def holders_of(tree: ast.Module, called: Container[str]) -> frozenset[str]:
    """Returns the names and attributes of a file that hold what functions of such names have returned:
    `answers`, after `self.asked, self.answers = Queue(), Queue()`."""
    return frozenset(
        ast.unparse(name).rpartition(".")[2]
        for node in nodes_within(tree)
        for name, value in assigned(node)
        if is_call(value, called)
    )
