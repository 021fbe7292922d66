"""Which names of a function hold text that is made to be written to a file, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from diagnose.source.flows import made_for, makes_only
from diagnose.source.statements import (
    Assignment,
    Scope,
    callee,
    calls_of,
    closure,
    nodes_of,
    statements_of,
    words,
    writes,
)

FILES = {"file", "f", "fh", "fp", "out", "output", "log", "logs", "stdout", "stderr", "csv", "stream"}
"""Words of what files are called."""

TEXT_WRITERS = {"writelines", "write_text"}


def texts_of(function: Scope) -> frozenset[str]:
    """Returns the names of a function that hold text, or lines of it, which is written to a file: `rows`,
    of `fh.write("\\n".join(rows))`. What is formatted there, `fh.write(f"{score}")`, need not be text."""
    statements = list(statements_of(function))
    files = {
        name
        for statement in statements
        if isinstance(statement, (ast.With, ast.AsyncWith, ast.Assign))
        if any(callee(call)[0] == "open" for call in calls_of(statement))
        for name in writes(statement)
    }
    written = {id(statement): set(_written(statement, files)) for statement in statements}
    if not any(written.values()):
        return frozenset()

    def serves(statement: ast.stmt, name: str) -> bool:
        return name in written[id(statement)] and isinstance(statement, ast.Expr)

    def more(known: set[str]) -> Iterator[str]:
        return (name for each in statements if makes_only(each, known) for name in _made_of(each))

    direct = closure(set().union(*written.values()), more)
    return made_for(statements, serves) & direct


def _written(statement: ast.stmt, files: set[str]) -> Iterator[str]:
    """Yields the names of texts that a statement writes to a file."""
    for call in calls_of(statement):
        name, base = callee(call)
        is_file = base in files or words(base.rpartition(".")[2]) & FILES
        if name in TEXT_WRITERS or (name == "write" and is_file):
            for arg in call.args:
                yield from _texts(arg)


def _made_of(statement: ast.stmt) -> Iterator[str]:
    """Yields the names of texts that a statement, which makes text, puts together."""
    value = statement.value if isinstance(statement, (Assignment, ast.Expr)) else None
    if isinstance(statement, ast.Expr) and isinstance(value, ast.Call):
        for arg in value.args:
            yield from _texts(arg)
    elif value is not None:
        yield from _texts(value)


def _texts(value: ast.expr) -> Iterator[str]:
    """Yields the names that can hold nothing but text, or lines of it, if an expression is a text."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        yield from _texts(value.left)
        yield from _texts(value.right)
    elif isinstance(value, ast.Call) and callee(value)[0] == "join" and _is_text_method(value):
        for arg in value.args:
            yield from _texts(arg)


def _is_text_method(call: ast.Call) -> bool:
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(base, ast.Constant) and isinstance(base.value, str)


def formats(statement: ast.stmt) -> bool:
    """Whether a statement makes text: `f"{value:.3f}"`, `", ".join(row)`, `"%d" % step`."""
    for node in nodes_of(statement):
        if isinstance(node, ast.JoinedStr):
            return True
        if isinstance(node, ast.Call) and callee(node)[0] in ("join", "format") and _is_text_method(node):
            return True
        text = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            return True
    return False
