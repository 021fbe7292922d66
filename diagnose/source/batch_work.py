"""Which lines of the training loop compute something of a batch that it already has: `x = smoothed(x)`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property

from diagnose.core.phases import Phase
from diagnose.source.calling import called_in, calls_of, parameters_of
from diagnose.source.dependencies import COUNTERS, NUMBERS, Found
from diagnose.source.kinds import ForLoop
from diagnose.source.names import last_name, names, words, words_of
from diagnose.source.parts import Part
from diagnose.source.reads_writes import reads, writes
from diagnose.source.sites import Line, Stack
from diagnose.source.sources import Sources
from diagnose.source.statements import header_lines, nodes_of

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

SETTINGS = {
    *("arg", "argparse", "args", "argv", "argument", "arguments", "cfg", "cli", "conf", "config"),
    *("configuration", "flags", "hparams", "hyperparameters", "options", "opts", "params", "settings"),
}
"""Words of functions that get what the script was told: `parser.parse_args()`, `load_config(path)`."""

CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
"""The name of what a line calls."""


class BatchWork:
    """The statements of a script that make something else of a batch.

    Args:
        sources: Text of each file; a line without text reads nothing.
    """

    def __init__(self, sources: Sources) -> None:
        self._lines: set[Line] = set()
        self._beside: defaultdict[Line, set[str]] = defaultdict(set)
        self._parts: list[tuple[Part, Found]] = []
        self._sources = sources
        self._reading: dict[Line, bool] = {}

    def add(self, part: Part, found: Found) -> None:
        """Takes in a function, and what its statements are for."""
        self._parts.append((part, found))

    def read(self) -> None:
        """Reads all functions, of which one may give to others the batch that it has."""
        given: defaultdict[str, set[str]] = defaultdict(set)
        pending = True
        while pending:
            before = sum(map(len, given.values()))
            in_hands = [InHand(part, found, given[part.name]) for part, found in self._parts]
            for in_hand in in_hands:
                for name, parameters in in_hand.gives():
                    given[name] |= parameters
            pending = sum(map(len, given.values())) > before
        for in_hand in in_hands:
            self._lines.update(in_hand.part.lines(*in_hand.working))
            for statement, called in in_hand.beside():
                for line in in_hand.part.lines(statement):
                    self._beside[line] |= called

    def is_in(self, stack: Stack) -> bool:
        """Whether a stack, up to the loop's own frame, is in such a statement, and not where that reads
        files."""
        *inner, own = stack
        beside = self._beside.get(own[:2], ())
        if own[:2] not in self._lines and not (inner and inner[-1][2].rpartition(".")[2] in beside):
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


class InHand:
    """What batch a function has in which of its statements, and what it makes of it.

    A batch is what a loop or a reader has got in the same turn, or what the function was given as one; and
    what stands beside what the loss is told as it is: the targets come with it, `x, y = pictures[rows],
    kinds[rows]`. So is what a statement makes anew under its own name, if the model gets it also where the
    statement is left out: `if rank == 1: x = smoothed(x)`.

    Args:
        part: The function.
        found: What its statements are for.
        given: Its parameters that other functions give a batch.
    """

    def __init__(self, part: Part, found: Found, given: Collection[str]) -> None:
        self.part = part
        self._given = given
        self._is_data = {s for s in part.statements if found.roles.get(s.lineno) is Phase.DATA_WAIT}
        ends = [s for s in part.statements if found.roles.get(s.lineno) is Phase.FORWARD]
        ends += [*part.models, *part.passes]
        self._used = set().union(*map(_worked_on, ends))
        leads = part.anchors.leads.keys()  # what others call models for make of it, they know
        self._told = set().union(*(_worked_on(s) for s in ends if leads.isdisjoint(header_lines(s))))
        self._loops = {loop for s in (*part.models, *part.passes) for loop in part.blocks.loops(s)}

    @cached_property
    def working(self) -> list[ast.stmt]:
        """The statements that make something else of a batch: `x = smoothed(x)`, after `x, y =
        next(batches)`. Not those that read what they are told of, nor those that are told only what to
        pick: `x = table[rows]`."""
        works: list[ast.stmt] = []
        for statement in self.part.statements:
            if statement not in self._is_data or id(statement) in self.part.hooked:
                continue
            outermost = getattr(statement, "value", None)
            if isinstance(outermost, ast.Call) and _unpacks(last_name(outermost.func)):
                continue
            if words_of(called_in(statement)) & GETS:
                continue
            worked_on = _worked_on(statement)
            if self._has(worked_on, statement, works) or self._may_be_left_out(statement, worked_on):
                works.append(statement)
        return works

    def gives(self) -> Iterator[tuple[str, set[str]]]:
        """Yields the functions that model calls go through, and their parameters that get a batch."""
        for statement in self.part.calls:
            for call in calls_of(statement):
                got = {
                    parameter
                    for parameter, value in self.part.effects.bound(call)
                    if _gets(ast.Expr(value))
                    or self._has(_worked_on(ast.Expr(value)), statement, self.working, given=True)
                }
                if got and (name := last_name(call.func)):
                    yield name, got

    def beside(self) -> Iterator[tuple[ast.stmt, set[str]]]:
        """Yields the statements that call models, and what they call besides for a batch that is there:
        `smoothed`, in `model(smoothed(x))`."""
        for statement in self.part.calls:
            called = {
                last_name(call.func)
                for call in calls_of(statement)
                if self._has(_worked_on(ast.Expr(call)), statement, self.working)
            }
            yield statement, {name for name in called if not words(name) & GETS and not _unpacks(name)}

    @cached_property
    def _sources(self) -> list[tuple[ast.stmt, set[str]]]:
        """The statements that get batches, and by which names."""
        found: list[tuple[ast.stmt, set[str]]] = []
        for statement in self.part.statements:
            asks = statement in self.part.asks
            if not asks and (statement not in self._is_data or id(statement) in self.part.hooked):
                continue
            if asks or self._is_got(statement):
                found.append((statement, self.part.writes[id(statement)] - COUNTERS))
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
                both = writes(statement)
                found.append((statement, {name for name in both if (both - {name}) & self._told}))
        return found

    def _is_got(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ForLoop):  # around the step, not over what that has
            counts = called_in(statement) & NUMBERS
            return statement in self._loops and not counts
        return _gets(statement)

    def _has(
        self, wanted: set[str], reader: ast.stmt, works: list[ast.stmt], *, given: bool = False
    ) -> bool:
        """Whether one of these names holds a batch where a statement reads it.

        Args:
            wanted: The names.
            reader: The statement.
            works: What makes something else of a batch.
            given: Whether heads of loops are left out in which no loader was seen: they may be of seeds.
        """
        blocks = self.part.blocks
        # In a loop that trains there is nothing new in each turn in what its function was given once.
        is_step = self._loops.isdisjoint(blocks.loops(reader))
        if is_step and any(blocks.is_given(name, reader) for name in wanted.intersection(self._given)):
            return True
        made = ((s, self.part.writes[id(s)]) for s in works)
        return any(
            blocks.reaches(source, name, reader) and not blocks.outlives_turn(source, name, reader)
            for source, held in (*self._sources, *made)
            if source.lineno < reader.lineno
            if not (given and isinstance(source, ast.For) and source not in self.part.asks)
            for name in held & wanted
        )

    def _may_be_left_out(self, statement: ast.stmt, worked_on: set[str]) -> bool:
        """Whether a statement gives a name another value of the same kind: the model, or the loss, gets it
        as it was where the statement does not run, or it is a parameter that is a batch then."""
        if not isinstance(statement, ast.Assign):
            return False
        blocks, definition = self.part.blocks, self.part.function
        parameters = () if isinstance(definition, ast.Module) else parameters_of(definition)
        for name in writes(statement) & worked_on & self._used:
            if name in parameters and name in self._told and blocks.is_given(name, statement):
                return True
            value = statement.value
            arms = (value.body, value.orelse) if isinstance(value, ast.IfExp) else ()
            if any(isinstance(arm, ast.Name) and arm.id == name for arm in arms):
                return True
            for call in self.part.models:
                around = list(blocks.heads(call))
                if any(isinstance(h, ast.If) and h not in around for h in blocks.heads(statement)) and any(
                    writer.lineno < statement.lineno and blocks.reaches(writer, name, call)
                    for writer in self.part.writers[name]
                    if name in _worked_on(call)
                ):
                    return True
        return False


def _unpacks(name: str) -> bool:
    """Whether a function of such a name makes a batch of bytes that it is given, not of another batch."""
    return bool(words(name) & UNPACKS) and not words(name) & WHOLE


def _worked_on(statement: ast.stmt) -> set[str]:
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
    return {name for name in reads(statement) if name.partition("[")[0].rpartition(".")[2] in besides}


def _gets(statement: ast.stmt) -> bool:
    """Whether a statement gets a batch: asks an iterator for the next one, or calls what reads or makes it.
    What numbers it is made by is none: `rows = order[i : i + 32]`."""
    called = {name for name in called_in(statement) if not words(name) & SETTINGS}
    return "next" in called or bool(words_of(called) & BATCHES)
