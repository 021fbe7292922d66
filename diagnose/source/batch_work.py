"""Which lines of the training loop compute something of a batch that it already has: `x = smoothed(x)`."""

from __future__ import annotations

import ast
import re

from diagnose.core.phases import Phase
from diagnose.source.calling import called_in, is_call
from diagnose.source.dependencies import Found
from diagnose.source.kinds import ForLoop
from diagnose.source.names import last_name, names, words, words_of
from diagnose.source.parts import Part
from diagnose.source.sites import Line, Stack
from diagnose.source.sources import Sources
from diagnose.source.statements import nodes_of

READS = {
    *("read", "reads", "load", "loads", "open", "fetch", "get", "download", "receive", "recv", "decode"),
    *("next", "query", "request", "restore", "imread", "memmap", "mmap", "fromfile"),
}
"""Words of functions that get data rather than compute something of it."""

GETS = {
    *READS,
    *("decoded", "decompress", "decompressed", "deserialize", "frombuffer", "fromstring", "genfromtxt"),
    *("imdecode", "loadtxt", "unpickle"),
}
"""Likewise, and of those that make a batch of the bytes or the text that a reader gave: in the loop it is
the input that takes so long. What a dataset does is another matter: see `analysis.transforms`."""

UNPACKS = {"parse", "parsed", "unpack", "unpacked"}
"""Likewise, where that is all that a statement calls them for: `x, y = unpack(blob)`. What is made of the
parts, `augment(*unpack(batch))`, is work, and so is what `parse_batch` makes of one."""

WHOLE = {"batch", "batches", "minibatch", "sample", "samples"}
"""Words for a batch."""

BATCHES = {*WHOLE, *GETS, *UNPACKS}
"""Words of functions that give a batch."""

CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
"""The name of what a line calls."""


class BatchWork:
    """The statements of a script that make something else of a batch. A line without text reads nothing.

    Attributes:
        lines: File and line of each.
    """

    def __init__(self, sources: Sources) -> None:
        self.lines: set[Line] = set()
        self._sources = sources
        self._reading: dict[Line, bool] = {}

    def add(self, part: Part, found: Found) -> None:
        """Takes in a function, and what its statements are for."""
        self.lines.update(part.lines(*_working(part, found)))

    def is_in(self, stack: Stack) -> bool:
        """Whether a stack, up to the loop's own frame, is in such a statement, and not where that reads
        files."""
        *inner, own = stack
        if own[:2] not in self.lines:
            return False
        for file, line, function in inner:
            name = function.rpartition(".")[2]
            if words(name) & GETS or _unpacks(name) or self._reads(file, line):
                return False
        return True

    def _reads(self, file: str, line: int) -> bool:
        """Whether a line calls what reads files, or gets data otherwise: `tensor(Image.open(path))`."""
        if (file, line) not in self._reading:
            called = CALLED.findall(self._sources.line(file, line))
            unpacks = any(map(_unpacks, called[:1]))
            self._reading[file, line] = unpacks or any(words(name) & GETS for name in called)
        return self._reading[file, line]


def _working(part: Part, found: Found) -> list[ast.stmt]:
    """Returns the statements that make something else of a batch which others have got in the same turn:
    `x = smoothed(x)`, after `x, y = next(batches)`. Not those that read what they are told of, nor those
    that are told only what to pick: `x = table[rows]`."""
    made = [
        s
        for s in part.statements
        if found.roles.get(s.lineno) is Phase.DATA_WAIT and id(s) not in part.hooked
    ]
    among = {id(each) for each in (*made, *part.asks)}
    got = [s for s in part.statements if id(s) in among and _gets(s)]
    works: list[ast.stmt] = []
    for statement in made:
        outermost = getattr(statement, "value", None)
        if isinstance(outermost, ast.Call) and _unpacks(last_name(outermost.func)):
            continue
        if words_of(called_in(statement)) & GETS:
            continue
        worked_on = _worked_on(statement, part)
        if any(
            part.blocks.reaches(source, name, statement)
            and not part.blocks.outlives_turn(source, name, statement)
            for source in got
            if source.lineno < statement.lineno
            for name in part.writes[id(source)] & worked_on
        ):
            works.append(statement)
    return works


def _unpacks(name: str) -> bool:
    """Whether a function of such a name makes a batch of bytes that it is given, not of another batch."""
    return bool(words(name) & UNPACKS) and not words(name) & WHOLE


def _worked_on(statement: ast.stmt, part: Part) -> set[str]:
    """Returns the names that a statement reads, but for those by which it only picks something."""
    nodes = nodes_of(statement)
    keys = (node.slice for node in nodes if isinstance(node, ast.Subscript))
    picking = {id(node) for key in keys for node in ast.walk(key)}
    kept = isinstance(statement, ast.AugAssign)
    besides = names(
        node
        for node in nodes
        if id(node) not in picking and (kept or not isinstance(getattr(node, "ctx", None), ast.Store))
    )
    read = part.reads[id(statement)]
    return {name for name in read if name.partition("[")[0].rpartition(".")[2] in besides}


def _gets(statement: ast.stmt) -> bool:
    """Whether a statement gets a batch: asks an iterator for the next one, or calls what reads or makes it;
    a loop's head, too. What numbers it is made by is none: `rows = order[i : i + 32]`."""
    if isinstance(statement, ForLoop):
        return not is_call(statement.iter, ("range", "count"))
    called = called_in(statement)
    return "next" in called or bool(words_of(called) & BATCHES)
