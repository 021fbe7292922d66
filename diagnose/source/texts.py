"""Which names of a function hold text or records that are made for a file, and for nothing else."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator

from diagnose.source.calling import called_in, callee, calls_in, calls_of, is_call
from diagnose.source.files import DUMPERS
from diagnose.source.flows import made_for, makes_only
from diagnose.source.kinds import Assignment, Comprehension, Scope, With
from diagnose.source.names import last_name, words
from diagnose.source.reads_writes import closure, reads, writes
from diagnose.source.statements import is_operation, nodes_of, statements_of, text_of

FILES = {"file", "f", "fh", "fp", "out", "output", "log", "logs", "stdout", "stderr", "csv", "stream"}
"""Words of what files are called."""

TEXT_WRITERS = {"writelines", "write_text"}

RECORD_WRITERS = {"writerow": 0, "writerows": 0, "executemany": 1}
"""Methods that write records to a file or a database, and which of their arguments these are."""

Display = ast.List | ast.Tuple | ast.Dict | ast.Set | Comprehension
CONTAINERS = {"list", "tuple", "dict", "zip", "sorted", "enumerate", "chain"}
"""What puts records together, and computes nothing."""

JOINS = {"join", "get", "replace", "zip_longest"}
"""What else is given two things and compares none."""

TELLS = {"print", "pprint", "debug", "info", "log"}
"""Functions and methods that only tell of what they are given."""

TAKES_TEXT = {*TEXT_WRITERS, *TELLS, "write", "write_bytes"}
"""What makes a record of what `dumps` makes text of: not what is sent to another process, which answers."""


def texts_of(function: Scope, opened: Iterable[str] = ()) -> frozenset[str]:
    """Returns the names of a function that hold text, or lines of it, which is written to a file: `rows`,
    of `fh.write("\\n".join(rows))`. What is formatted there, `fh.write(f"{score}")`, need not be text.
    Records that are put together there are like text: `rows`, of `table.writerows(rows)`. What was opened
    elsewhere in the file is given by its names.
    """
    statements = list(statements_of(function))
    files = {
        name
        for statement in statements
        if isinstance(statement, (With, ast.Assign)) and "open" in called_in(statement)
        for name in writes(statement)
    }.union(opened)
    recorded = {id(statement): set(_recorded(statement)) for statement in statements}
    written = {
        id(statement): recorded[id(statement)].union(_written(statement, files)) for statement in statements
    }
    if not any(written.values()):
        return frozenset()

    def serves(statement: ast.stmt, name: str) -> bool:
        return name in written[id(statement)] and isinstance(statement, ast.Expr)

    def more(known: set[str]) -> Iterator[str]:
        return (name for each in statements if makes_only(each, known) for name in _made_of(each))

    direct = closure(set().union(*written.values()), more)
    found = made_for(statements, serves) & direct
    records = set().union(*recorded.values())
    return frozenset(name for name in found if name not in records or _is_record(name, statements, serves))


def _written(statement: ast.stmt, files: set[str]) -> Iterator[str]:
    """Yields the names of texts that a statement writes to a file."""
    for call in calls_of(statement):
        name, base = callee(call)
        owner = base.rpartition(".")[2]
        is_file = base in files or owner in files or words(owner) & FILES
        if name in TEXT_WRITERS or (name == "write" and is_file):
            for arg in call.args:
                yield from _texts(arg)


def _recorded(statement: ast.stmt) -> Iterator[str]:
    """Yields the names of records that a statement writes to a file, or makes text of."""
    told = not isinstance(statement, ast.Expr) or not called_in(statement).isdisjoint(TAKES_TEXT)
    for call in calls_of(statement):
        name, base = callee(call)
        at = RECORD_WRITERS.get(name) if base else None
        if base in DUMPERS and (name == "dump" or (name == "dumps" and told)):
            at = 0
        if at is not None and len(call.args) > at and isinstance(given := call.args[at], ast.Name):
            yield given.id


def _is_record(name: str, statements: Iterable[ast.stmt], serves: Callable[[ast.stmt, str], bool]) -> bool:
    """Whether a name holds what is put together, `[step, *probs]`, and nothing is given it to keep."""
    made = [statement for statement in statements if name in writes(statement)]
    if not made or not all(map(_puts_together, made)):
        return False
    return not any(
        isinstance(statement, ast.Expr) and name in reads(statement) and _hands_on(statement, name)
        for statement in statements
        if not serves(statement, name)
    )


def _puts_together(statement: ast.stmt) -> bool:
    """Whether a statement assigns a list, tuple or mapping that is written out there, or adds to one."""
    value = statement.value if isinstance(statement, (Assignment, ast.Expr)) else None
    added = isinstance(statement, ast.Expr) and isinstance(value, ast.Call)
    values = value.args if isinstance(value, ast.Call) and added else [value]
    return all(
        (isinstance(each, Display) or is_call(each, CONTAINERS)) and not _compares(each) for each in values
    )


def _compares(value: ast.expr) -> bool:
    """Whether a function is given two things, as what scores is, `distance(guess, text)`: more than to put
    together what there is."""
    return any(
        not is_call(call, CONTAINERS | JOINS)
        and not hasattr(builtins, last_name(call.func))
        and sum(not isinstance(each, ast.Constant) for each in call.args) > 1
        for call in calls_in(value)
    )


def _hands_on(statement: ast.Expr, name: str) -> bool:
    """Whether a statement gives what it reads to something else: `replay.extend(rows)`."""
    call = statement.value
    return not isinstance(call, ast.Call) or not (is_call(call, TELLS) or callee(call)[1] == name)


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
    elif is_operation(value, ast.Add):
        yield from _texts(value.left)
        yield from _texts(value.right)
    elif is_call(value, {"join"}) and _is_text_method(value):
        for arg in value.args:
            yield from _texts(arg)


def _is_text_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and text_of(call.func.value) is not None


def formats(statement: ast.stmt) -> bool:
    """Whether a statement makes text: `f"{value:.3f}"`, `", ".join(row)`, `"%d" % step`."""
    return any(
        isinstance(node, ast.JoinedStr)
        or (is_call(node, ("join", "format")) and _is_text_method(node))
        or (is_operation(node, ast.Mod) and text_of(node.left) is not None)
        for node in nodes_of(statement)
    )
