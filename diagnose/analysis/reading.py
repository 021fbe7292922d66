"""Which lines read files, data bases, archives or a network, and how much of the time passes there."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from diagnose.source.calling import callee
from diagnose.source.files import aliases_of, opens_to_write, origin, queries_of, writes_table
from diagnose.source.names import words
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame

MIN_SAMPLED_NS = 200_000_000
"""Some 50 samples; fewer divide their time too coarsely."""

With = ast.With | ast.AsyncWith

READERS = """
    execute extractfile fetchall fetchmany fetchone getmember getmembers
    fromfile memmap open pread preadv read read1 read_bytes read_text readall readinto readinto1 readline
    readlines readv
    getresponse recv recv_into recvfrom recvmsg recvmsg_into urlopen
"""
"""Names of what opens a file or reads it, a data base's rows and a network's answers included, and decodes
nothing."""

READS = frozenset(READERS.split())
OPENS = {
    *(("h5py", "File"), ("requests", "get"), ("sqlite3", "connect")),
    *(("tarfile", "TarFile"), ("tarfile", "open"), ("zipfile", "ZipFile")),
}
"""Likewise, with the package: what opens a data base or an archive, or asks a server."""

LOADS = {
    *((package, "load") for package in ("joblib", "numpy", "pickle", "torch")),
    ("linecache", "getline"),
}
"""Likewise: `load` alone is anything. Some take apart what they read; whether that is what takes the time
is told by the system calls and bytes."""

ASKS = {"execute", "extractfile", "fetchall", "fetchmany", "fetchone", "getmember", "getmembers"}
"""Names of what a data base or an archive is asked by. However long it computes, it looks it up."""

HANDS_ON = {
    *(
        "array",
        "as_tensor",
        "asarray",
        "copy",
        "float",
        "from_numpy",
        "frombuffer",
        "fromiter",
        "int",
        "len",
    ),
    *("list", "reshape", "str", "tensor", "tuple"),
}
"""Names of what only takes over what was read."""

DATABASES = {
    *("con", "conn", "connect", "connection", "cur", "cursor"),
    *("database", "db", "session", "sql", "sqlite", "sqlite3"),
}
"""Words of what answers by `execute` from a data base; a pipeline and a plan have a method of that name."""

ARCHIVES = ("TarFile", "ZipFile")

DECODES = "Image"
"""What is opened by this module is a picture, and taking it apart is most of the work."""


class Lines(NamedTuple):
    """Lines of a file that read another one, or work on it while it is open, as in
    `with open(path) as file: text = file.read()`; and those of them that do nothing but ask a data base, or
    open an archive and look something up in it."""

    reading: frozenset[int]
    asking: frozenset[int]


class Shares(NamedTuple):
    """Parts of the sampled time, 0 to 1, in such lines; `None` where samples are too few."""

    reading: float | None
    asking: float | None


def reading_shares(
    stacks: Iterable[tuple[tuple[Frame, ...], float]], sources: Sources, places: Collection[Frame] = ()
) -> Shares:
    """Returns which part of the sampled time passes in lines that read.

    Args:
        stacks: Sampled stacks of loading, a package's frame first, and nanoseconds.
        sources: Where the script's text is read.
        places: Lines that were seen to open files, whatever their text says.
    """
    whole = reading = asking = 0.0
    opened = {(file, function, line) for place in places for file, function, line in _block(place, sources)}
    known: dict[str, Lines] = {}
    for (package, *stack), weight_ns in stacks:
        whole += weight_ns
        if not stack:
            continue
        file, line, function = stack[0]
        if file not in known:
            known[file] = lines_that_read(sources.tree(file))
        reading += weight_ns * (line in known[file].reading or (file, function, line) in opened)
        asking += weight_ns * (line in known[file].asking and not package[0])
    if whole < MIN_SAMPLED_NS:
        return Shares(None, None)
    return Shares(reading / whole, asking / whole)


def _block(place: Frame, sources: Sources) -> Iterable[tuple[str, str, int]]:
    """Returns the lines of the `with` statement whose head opens a file; else the one line."""
    file, line, function = place
    tree, lines = sources.tree(file), range(line, line + 1)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, With) and node.lineno <= line < node.body[0].lineno:
            lines = range(node.lineno, (node.end_lineno or line) + 1)
            break
    return [(file, function, each) for each in lines]


def lines_that_read(tree: ast.Module | None) -> Lines:
    """Returns the lines of a file that read."""
    if tree is None:
        return Lines(frozenset(), frozenset())
    aliases, queries = aliases_of(tree), queries_of(tree)

    def reads(call: Any) -> bool:
        return isinstance(call, ast.Call) and _reads(call, aliases, queries)

    reading: set[int] = set()
    asking: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.With, ast.AsyncWith, ast.Call)):
            inside = [] if isinstance(node, ast.Call) else [item.context_expr for item in node.items]
            calls = [node, *(call for head in inside for call in ast.walk(head))]
            if any(map(reads, calls)):
                reading.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.stmt):
            lines, heads = _head(node)
            made = [call for head in heads for call in ast.walk(head) if isinstance(call, ast.Call)]
            asks = [call for call in made if reads(call) and _asks(call, aliases)]
            if asks and all(reads(call) or callee(call)[0] in HANDS_ON for call in made):
                asking.update(lines)
    return Lines(frozenset(reading), frozenset(asking))


def _head(statement: ast.stmt) -> tuple[range, list[ast.AST]]:
    """Returns the lines of a statement, and what it computes there: of one with a body, without that."""
    end = (statement.end_lineno or statement.lineno) + 1
    if isinstance(body := getattr(statement, "body", None), list):
        end = body[0].lineno
    elif isinstance(statement, ast.Match):
        end = statement.cases[0].pattern.lineno
    parts = list(ast.iter_child_nodes(statement))
    heads = [part for part in parts if not isinstance(part, (ast.stmt, ast.ExceptHandler, ast.match_case))]
    return range(statement.lineno, max(end, statement.lineno + 1)), heads


def _asks(call: ast.Call, aliases: dict[str, str]) -> bool:
    return origin(call, aliases) in OPENS or callee(call)[0] in ASKS


def _reads(call: ast.Call, aliases: dict[str, str], queries: Collection[str]) -> bool:
    package, name = origin(call, aliases)
    if opens_to_write(call) or writes_table(call, name, queries):
        return False
    if (name in ARCHIVES or package == "tarfile") and not _mode_of(call).startswith("r"):
        return False
    if name == "execute" and not words(callee(call)[1]) & DATABASES:
        return False
    if (package, name) in OPENS | LOADS:
        return True
    decodes = callee(call)[1].rpartition(".")[2] == DECODES or package.rpartition(".")[2] == DECODES
    return name in READS and not decodes


def _mode_of(call: ast.Call) -> str:
    """Returns the mode of an archive that is opened, `r` where it is not written out there."""
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return str(texts[0]) if texts else "r"
