"""What changes the data between epochs, so that their next batches are others: `train_set.resample()`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from diagnose.source.calling import called_in, callee, calls_of
from diagnose.source.dependencies import Found
from diagnose.source.effects import Effects
from diagnose.source.kinds import Assignment, Loop
from diagnose.source.names import words_of
from diagnose.source.parts import Part
from diagnose.source.reads_writes import writes
from diagnose.source.rollouts import EVALUATES
from diagnose.source.sites import Line
from diagnose.source.statements import all_lines, header_lines, statements_of

STEPS = {"next", "optimizer"}
"""Kinds of the calls that an epoch makes more than once, and a step does not."""

ITEMS = {"__getitem__", "__getitems__", "__iter__", "__next__"}
"""Methods by which loaders and loops read data."""

DATA_WORDS = {
    *("data", "dataset", "datasets", "set", "trainset", "ds", "dset", "corpus", "samples", "examples"),
    *("batches", "sampler", "loader", "dataloader", "dl"),
}
"""Words in what data are called, and what draws them."""

ASIDE_WORDS = {
    *("val", "valid", "validation", "test", "eval", "evaluation", "dev", "holdout", "heldout", "held"),
    *("ood", "unseen", "gallery", "probe", "calib"),
}
"""Words in what data are called of which no training batch is made."""

NO_DATA_WORDS = {"log", "logger", "stats", "meter", "writer", "grid", "plot", "bar", "timer", "query"}
"""Words in the names of what is no data, whatever else it is called, or not surely: `data_logger`."""


def changes_of_data(part: Part, found: Found, epochs: Collection[str]) -> Iterator[ast.stmt]:
    """Yields the statements between epochs that set what batches are read from, and serve nothing else.

    That data are made batches of is known by what these are made of, or said by their name. Of what is set,
    something has to be read by who goes over the data, or, where their name says what they are, by a method
    of theirs that makes batches: `corpus.reshuffle()`, after which `corpus.batch(i)` gives others.
    The functions that train for an epoch are those of `epochs_in`.
    """
    held = set().union(*(wanted for _, wanted in found.for_batch))
    steps = _turning_with_steps(part, epochs)
    around = {id(loop) for each in (*part.asks, *part.calls) for loop in part.blocks.loops(each)}
    for statement in part.statements:
        loops = {id(loop) for loop in part.blocks.loops(statement)}
        if not isinstance(statement, (ast.Expr, Assignment)) or not loops & around or loops & steps:
            continue
        if id(statement) in part.hooked or statement.lineno in found.roles:
            continue
        if words_of(called_in(statement)) & EVALUATES:
            continue
        if any(_is_read(name, held, part, statement) for name in part.writes[id(statement)]):
            yield statement


def _turning_with_steps(part: Part, epochs: Collection[str]) -> set[int]:
    """Returns the loops of which each turn is a step, not an epoch."""
    steps = [*part.asks, *(call for call in part.calls if not _trains_an_epoch(call, part, epochs))]
    return {id(loops[-1]) for each in steps if (loops := part.blocks.loops(each))}


def _trains_an_epoch(call: ast.stmt, part: Part, epochs: Collection[str]) -> bool:
    return any(lead in epochs for line in header_lines(call) for lead in part.anchors.leads.get(line, ()))


def epochs_in(
    straight: Mapping[Line, set[str]], through: Mapping[Line, set[str]], effects: Effects
) -> set[str]:
    """Returns the functions through which models are called that loop over steps, not over parts of one.

    Args:
        straight: What kinds of calls were made from each file and line.
        through: The functions through which a model is called, by file and line.
    """
    leads = set().union(*through.values())
    steps = {place for place, kinds in straight.items() if kinds & STEPS}
    while more := {
        place
        for place, called in through.items()
        if place not in steps
        and any(_holds(f, function, steps) for n in called for f, function in effects.functions.get(n, ()))
    }:
        steps |= more
    return {
        lead
        for lead in leads
        for file, function in effects.functions.get(lead, ())
        if any(isinstance(loop, Loop) and _holds(file, loop, steps) for loop in statements_of(function))
    }


def _holds(file: str, block: ast.stmt, places: Collection[Line]) -> bool:
    return any((file, line) in places for line in all_lines(block))


def _is_read(name: str, held: Collection[str], part: Part, statement: ast.stmt) -> bool:
    """Whether batches are made of what a name holds, `train_set.pairs`, through its object.

    What the statement has a method of the object set has to be read by a method of the same class.
    """
    names = name.partition("[")[0].split(".")
    called = {callee(call) for call in calls_of(statement)} if name not in writes(statement) else ()
    for place in range(1, len(names)):
        of, attribute = ".".join(names[:place]), ".".join(["self", *names[place:]])
        its = words_of(names[place - 1 : place])
        is_named = bool(its & DATA_WORDS) and not its & NO_DATA_WORDS
        if of == "self" or words_of(names[:place]) & ASIDE_WORDS or not (is_named or of in held):
            continue
        methods = {each.rpartition(".")[2] for each in held if each.rpartition(".")[0] == of}
        classes = part.effects.read_by(frozenset(ITEMS | methods if is_named else ITEMS)).get(attribute)
        setting = [part.effects.set_by(method).get(attribute) for method, base in called if base == of]
        if classes is not None and not any(by is not None and not by & classes for by in setting):
            return True
    return False
