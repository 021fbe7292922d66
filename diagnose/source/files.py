"""Which calls write files or tables, and which names of a function are on their way into a checkpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping

from diagnose.source.calling import callee, calls_of, given_to, is_call
from diagnose.source.kinds import Scope, With
from diagnose.source.names import last_name, names_in, words, words_of
from diagnose.source.place import Place
from diagnose.source.reads_writes import APPENDS, grow, writes
from diagnose.source.statements import assigned, is_operation, nodes_within, statements_of, text_of

SAVERS: Mapping[tuple[str, str], int | None] = {
    ("torch", "save"): 1,
    **{(package, "dump"): 1 for package in ("pickle", "joblib", "dill", "cloudpickle")},
    **{(package, "dumps"): None for package in ("pickle", "dill", "cloudpickle")},
    **{("numpy", name): 0 for name in ("save", "savez", "savez_compressed")},
}
"""Package and name of what saves state, and which of its arguments is the file; `None` where it returns
what will be written."""

RENAMERS = {("os", "replace"), ("os", "rename"), ("shutil", "move")}
"""What puts a file, written beside the last one, in its place: that may wait for the disk."""

DUMPERS = {"json", "csv", "yaml", "msgpack", "orjson"}
"""Packages that make text of records."""

WRITERS = {"open", "write", "writelines", "write_text", "write_bytes", "flush", "fsync", "fdatasync"}
"""What else is done to a file that is saved to."""

MODE = re.compile(r"[rwaxbt+]+(:\w*)?")
FILE_NAME = re.compile(r"\.(\w{2,5}?)(\.(gz|xz|zip|zst))?$")
STATE_FILES = {"pt", "pth", "ckpt", "safetensors"}
"""Endings of files that hold a model's state."""

WRITES_TABLE = re.compile(r"\s*(insert|update|replace|delete)\b", re.IGNORECASE)
"""How a query begins that changes a table."""

NO_WRITERS = {"load", "read", "remove", "unlink", "exists", "open", *APPENDS, "add", "insert", "register"}
"""Words of methods that are given a path and write no file."""

BUFFERS = {"buffer", "buf", "bytesio", "bio"}
"""Words of what is written to, and is no file."""


def aliases_of(tree: ast.Module) -> dict[str, str]:
    """Returns what the names stand for that a file imports: `pkl`, for `pickle`."""
    found = {"np": "numpy"}
    for node in nodes_within(tree):
        if isinstance(node, ast.Import):
            found.update((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
    return found


def origin(call: ast.Call, aliases: Mapping[str, str]) -> tuple[str, str]:
    """Returns module, or object, and name of what is called, whatever the file calls them."""
    name, base = callee(call)
    if not base:
        base, _, name = aliases.get(name, name).rpartition(".")
    head, dot, rest = base.partition(".")
    return f"{aliases.get(head, head)}{dot}{rest}".rpartition(".")[2], name


def opens_to_write(call: ast.Call) -> bool:
    """Whether a file is opened in a mode that is none for reading only: `path.open("a")`."""
    name, base = callee(call)
    if name != "open" and not (base and name == "File"):
        return False
    modes = [*(call.args if base else call.args[1:2])]
    modes += [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    for mode in modes:
        text = text_of(mode)
        if text is None:
            if not base:
                return True
        elif MODE.fullmatch(text) and set(text.partition(":")[0]) & set("wax+"):
            return True
    return False


def into_memory(place: Place) -> bool:
    """Whether a statement saves to memory, by its words or by what is made around it: `image.save(out)`."""
    saves = [call for call in calls_of(place.statement) if is_call(call, ("save",))]
    given = names_in(*(to for call in saves for to in given_to(call)[:1]))
    around = place.function or (place.loops[-1] if place.loops else place.statement)
    return bool(words_of(given) & BUFFERS or given & _in_memory(around)) or "BytesIO" in given


def _in_memory(around: ast.AST) -> set[str]:
    """Returns the names that are given a file in memory: `out = io.BytesIO()`, `with BytesIO() as out`."""
    pairs = [pair for node in ast.walk(around) for pair in assigned(node)]
    for node in ast.walk(around):
        if isinstance(node, With):
            pairs += [(each.optional_vars, each.context_expr) for each in node.items if each.optional_vars]
    return {last_name(target) for target, value in pairs if is_call(value, ("BytesIO",))}


def file_written(call: ast.Call) -> str:
    """Returns the ending of the file whose path is given to a call; empty if none is written."""
    if words(last_name(call.func)) & NO_WRITERS:
        return ""
    return next(filter(None, map(_ending, given_to(call))), "")


def _ending(path: ast.expr) -> str:
    """Returns the ending of a path that is put together there: `png`, of `folder / f"{step}.png"`."""
    if is_call(path, ("str", "fspath", "Path")) and path.args:
        return _ending(path.args[0])
    text, is_path = path, False
    if is_operation(path, ast.Div):
        text, is_path = path.right, True
    elif is_call(path, {"join"}) and len(path.args) > 1:
        text, is_path = path.args[-1], True
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    texts = [part for part in map(text_of, parts) if part is not None]
    named = FILE_NAME.search(texts[-1]) if texts and isinstance(parts[-1], ast.Constant) else None
    return named[1] if named and (is_path or any("/" in each for each in texts)) else ""


def saved_in(function: Scope, aliases: Mapping[str, str]) -> frozenset[str]:
    """Returns the names, without what they are attributes of, of the files that state is saved to in a
    function, and of what a saver has made for one."""
    held: set[str] = set()
    statements = list(statements_of(function))
    for statement in statements:
        for call in calls_of(statement):
            place = origin(call, aliases)
            if place not in SAVERS:
                continue
            at = SAVERS[place]
            if at is None:
                held |= writes(statement)
            elif len(call.args) > at and isinstance(call.args[at], (ast.Name, ast.Attribute)):
                held.add(ast.unparse(call.args[at]))
    if held:
        grow(held, statements)
    return frozenset(name.partition("[")[0].rpartition(".")[2] for name in held)


def writes_table(call: ast.Call, name: str, queries: Collection[str]) -> bool:
    """Whether a call writes to a database: `db.execute("INSERT ...")`, `connection.commit()`.

    Args:
        name: What is called.
        queries: Names of the file that hold a text which writes to one.
    """
    if name in ("commit", "executemany"):
        return True
    if name != "execute" or not call.args:
        return False
    query = call.args[0]
    if isinstance(query, (ast.Name, ast.Attribute)):
        return ast.unparse(query).rpartition(".")[2] in queries
    return _is_writing(query)


def queries_of(tree: ast.Module) -> frozenset[str]:
    """Returns the names and attributes of a file that hold a text which writes to a database, and no other:
    `INSERT`, after `INSERT = "INSERT INTO losses VALUES (?, ?)"`."""
    found: dict[str, bool] = {}
    for node in nodes_within(tree):
        for name, value in assigned(node):
            held = ast.unparse(name).rpartition(".")[2]
            found[held] = found.get(held, True) and _is_writing(value)
    return frozenset(name for name, writing in found.items() if writing)


def _is_writing(query: ast.expr) -> bool:
    """Whether an expression is a query, written out there, that changes a table."""
    first = query.values[0] if isinstance(query, ast.JoinedStr) and query.values else query
    return bool(WRITES_TABLE.match(text_of(first) or ""))
