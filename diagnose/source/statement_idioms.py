"""What a statement is there for, told from its syntax: to log, to wait for a device, to clip, ..."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from diagnose.source.call_idioms import Within, of_call, only_reads, spins
from diagnose.source.calling import calls_in, is_call
from diagnose.source.files import writes_table
from diagnose.source.flows import makes_only
from diagnose.source.kinds import Assignment, Comprehension, ForLoop, Loop, With
from diagnose.source.names import last_name, names, names_in, words_of
from diagnose.source.place import Place
from diagnose.source.purposes import (
    CHAIN,
    CLIP,
    COLLECT,
    EMA,
    LOG,
    METRIC,
    PYTHON_LOOP,
    ROWS,
    SAVE,
    SCHEDULE,
    SLICES,
    SYNC,
    SYNCHRONIZE,
    UPDATE,
    WAIT,
    WHOLE,
)
from diagnose.source.reads_writes import reads, writes
from diagnose.source.schedules import sets_rate
from diagnose.source.slices import is_chain, is_side_loop, takes_slices
from diagnose.source.statements import nodes_of, statements_in, yields
from diagnose.source.tensor_operations import is_at_once
from diagnose.source.tensor_values import asks_tensor
from diagnose.source.weight_idioms import of_lists, of_weights, serves_average, serves_clip, serves_update

LOADERS = {"batches", "dataloader", "dl", "loader", "loaders"}
"""Words of what gives batches."""

HOOKED_CALLS = {"backward", "step", "zero_grad"}
"""Calls whose time is measured apart: beside them a line's time is that of what else it does."""


def of_places(places: Sequence[Place], within: Within) -> tuple[str, ...]:
    """Returns what all statements of a line do: the sampler does not tell which of them took the time."""
    found = [tuple(_idioms(place, within)) for place in places]
    if len(found) > 1:
        found = [
            each
            for each, place in zip(found, places, strict=True)
            if (each and not _drops(place)) or _takes_time(place)
        ]
    return tuple(idiom for idiom in found[0] if all(idiom in each for each in found)) if found else ()


def _drops(place: Place) -> bool:
    """Whether a statement only forgets a value: `p.grad = None`."""
    statement = place.statement
    return isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)


def _takes_time(place: Place) -> bool:
    """Whether a statement calls or repeats anything that is not measured apart."""
    nodes = nodes_of(place.statement)
    return any(
        isinstance(node, ast.comprehension)
        or (isinstance(node, ast.Call) and not is_call(node, HOOKED_CALLS))
        for node in nodes
    )


def _idioms(place: Place, within: Within) -> Iterator[str]:
    """Yields what a statement does, the most telling first."""
    found: set[str] = set()
    nodes = nodes_of(place.statement)
    in_comprehension = {
        id(inner) for node in nodes if isinstance(node, Comprehension) for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            found.update(of_call(node, place, within, in_comprehension=id(node) in in_comprehension))
    if "argmax" in names(nodes) and any(isinstance(node, ast.Compare) for node in nodes):
        found.add(METRIC)
    if isinstance(place.statement, (ast.If, ast.While, ast.Assert)) and asks_tensor(place.statement.test):
        found.add(SYNC)
    if spins(place.statement, place) or (place.loops and spins(place.loops[0], place)):
        found.add(WAIT)
    if not found - {SYNC} and _makes_text(place):
        found.add(SAVE if writes(place.statement) & place.saved else LOG)
    if not found and _makes_saved(place):
        found.add(SAVE)
    if isinstance(place.statement, ast.Raise):
        found.discard(METRIC)
    if not within.stepping:
        works = any(isinstance(node, (ast.Call, ast.comprehension)) for node in nodes)
        sets = sets_rate(place.statement, place.loops, place.groups)
        if sets or (works and makes_only(place.statement, place.rates)):
            found.add(SCHEDULE)
        beside = replace(place, turned=frozenset(), helpers={}) if within.model else place
        found.update(of_weights(beside, nodes))  # what a model makes of weights is none of these
        for node in nodes:
            found.update(of_lists(node, place) if isinstance(node, ast.Call) else ())
    if isinstance(place.statement, ForLoop):
        for inner in place.statement.body:
            inside = replace(place, statement=inner, loops=(place.statement, *place.loops))
            turn = set(_idioms(inside, within))
            found |= turn & {CLIP, EMA, UPDATE} if WHOLE not in turn else set()
    if isinstance(place.statement, With):  # whose end writes what its body has to write
        calls = calls_in(*place.statement.body)
        if any(writes_table(call, last_name(call.func), place.queries) for call in calls):
            found.add(LOG)
    if within.loss:
        found.discard(CLIP)  # of norms that the loss punishes
    if within.module:
        found.discard(METRIC)
    of_each = bool(in_comprehension) or _of_turns(place, nodes)
    if not within.waits and not only_reads(nodes, of_each=of_each):
        found.discard(SYNC)
    at_once = is_at_once(nodes)
    if found == {WHOLE} and not at_once:
        found.clear()
    for idiom in (LOG, CLIP, EMA, UPDATE, WHOLE, METRIC, SAVE, SYNCHRONIZE, COLLECT, WAIT, SCHEDULE, SYNC):
        if idiom in found:
            yield idiom
    if not found and not within.stepping and serves_average(place):
        yield EMA
    elif not found and not (within.stepping or within.model) and serves_update(place, nodes):
        yield UPDATE
    elif not found and not (within.stepping or within.model) and serves_clip(place):
        yield CLIP
    elif not found and (in_comprehension or _side_loops(place, within)) and not at_once:
        yield PYTHON_LOOP
        if takes_slices(place.statement, place.loops, nodes, place.function):
            yield SLICES
            if not takes_slices(place.statement, place.loops, nodes):
                yield ROWS
        if is_chain(place.statement, place.loops, nodes):
            yield CHAIN


def _makes_saved(place: Place) -> bool:
    """Whether a statement makes what is saved of what a saver has made: `packed = compress(state)`."""
    if not place.saved or not isinstance(place.statement, Assignment):
        return False
    made, used = (
        {name.partition("[")[0].rpartition(".")[2] for name in found}
        for found in (writes(place.statement), reads(place.statement))
    )
    return bool(made) and made <= place.saved and bool(used & place.saved)


def _makes_text(place: Place) -> bool:
    """Whether a statement makes text that is written to a file, or goes over what that is made of."""
    if isinstance(place.statement, ForLoop):
        return all(makes_only(each, place.texts) for each in place.statement.body)
    return makes_only(place.statement, place.texts)


def _side_loops(place: Place, within: Within | None = None) -> list[Loop]:
    """Returns the loops around the statement that train nothing. In an optimizer's step one over its groups
    is none: a group is many tensors. Nor is one that makes a batch in each turn, or hands a loader's on,
    and what is around that."""
    stepping = within is not None and within.stepping
    return [
        loop
        for loop in takewhile(lambda loop: not _feeds(loop), place.loops)
        if is_side_loop(loop) and not (stepping and _goes_over_groups(loop))
    ]


def _feeds(loop: Loop) -> bool:
    """Whether a loop makes a batch in each turn, or hands a loader's on, maybe a turn later."""
    if isinstance(loop, ForLoop) and words_of(names_in(loop.iter)) & LOADERS:
        return any(map(yields, statements_in(loop)))
    if isinstance(loop, ForLoop) and not _takes_several(loop.iter):
        return False
    return any(map(yields, _in_each_turn(loop.body)))


def _takes_several(numbers: ast.expr) -> bool:
    """Whether a loop goes on by more than one: `range(0, len(rows), 32)`."""
    return is_call(numbers, ("range", "trange")) and len(numbers.args) > 2


def _in_each_turn(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that each turn of a loop gets to."""
    for statement in body:
        yield statement
        if isinstance(statement, (With, ast.Try)):
            yield from _in_each_turn(statement.body)


def _goes_over_groups(loop: Loop) -> bool:
    return isinstance(loop, ForLoop) and "param_groups" in names_in(loop.iter)


def _of_turns(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether a statement has to do with what a loop that trains nothing goes over."""
    turns = (loop.target for loop in _side_loops(place) if isinstance(loop, ForLoop))
    return bool(names_in(*turns) & names(nodes))
