"""What changes the data between epochs, so that their next batches are others: `train_set.resample()`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from diagnose.source.dependencies import Found
from diagnose.source.parts import Part
from diagnose.source.statements import Assignment, Loop, header_lines, statements_of, words_of

ITEMS = {"__getitem__", "__getitems__", "__iter__", "__next__"}
"""Methods by which loaders and loops read data."""

DATA_WORDS = {
    *("data", "dataset", "datasets", "set", "trainset", "ds", "dset", "corpus", "samples", "examples"),
    *("batches", "sampler", "loader", "dataloader", "dl"),
}
"""Words in what data are called, and what draws them."""

ASIDE_WORDS = {"val", "valid", "validation", "test", "eval", "evaluation", "dev", "holdout"}
"""Words in what data are called of which no training batch is made."""


def changes_of_data(part: Part, found: Found, turns: Collection[tuple[str, int]]) -> Iterator[ast.stmt]:
    """Yields the statements between epochs that set what batches are read from, and serve nothing else.

    That data are made batches of is known by what these are made of, or said by their name. Of what is set,
    something has to be read by who goes over the data, or, where their name says what they are, by a method
    of theirs that makes batches: `corpus.reshuffle()`, after which `corpus.batch(i)` gives others.

    Args:
        part: The function.
        found: What else its statements are for.
        turns: File and line of all that ask for a batch or call a model, straight or through functions.
    """
    held = set().union(*(wanted for _, wanted in found.for_batch))
    steps = _turning_with_steps(part, turns)
    around = {id(loop) for each in (*part.asks, *part.calls) for loop in part.blocks.loops(each)}
    for statement in part.statements:
        loops = {id(loop) for loop in part.blocks.loops(statement)}
        if not isinstance(statement, (ast.Expr, Assignment)) or not loops & around or loops & steps:
            continue
        if id(statement) in part.hooked or statement.lineno in found.roles:
            continue
        if any(_is_read(name, held, part) for name in part.writes[id(statement)]):
            yield statement


def _turning_with_steps(part: Part, turns: Collection[tuple[str, int]]) -> set[int]:
    """Returns the loops of which each turn is a step, not an epoch."""
    steps = [*part.asks, *(call for call in part.calls if not _trains_an_epoch(call, part, turns))]
    return {id(loops[-1]) for each in steps if (loops := part.blocks.loops(each))}


def _trains_an_epoch(call: ast.stmt, part: Part, turns: Collection[tuple[str, int]]) -> bool:
    """Whether the function through which a statement calls a model loops over steps itself."""
    leads = set().union(*(part.anchors.leads.get(line, ()) for line in header_lines(call)))
    return any(
        (file, line) in turns
        for lead in leads
        for file, function in part.effects.functions.get(lead, ())
        for loop in statements_of(function)
        if isinstance(loop, Loop)
        for line in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
    )


def _is_read(name: str, held: Collection[str], part: Part) -> bool:
    """Whether batches are made of what a name holds, `train_set.pairs`, through its object."""
    names = name.partition("[")[0].split(".")
    for place in range(1, len(names)):
        of, attribute = ".".join(names[:place]), ".".join(["self", *names[place:]])
        is_named = bool(words_of(names[place - 1 : place]) & DATA_WORDS)
        if of == "self" or words_of(names[:place]) & ASIDE_WORDS or not (is_named or of in held):
            continue
        methods = {each.rpartition(".")[2] for each in held if each.rpartition(".")[0] == of}
        if attribute in part.effects.read_by(ITEMS | methods if is_named else ITEMS):
            return True
    return False
