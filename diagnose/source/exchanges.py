"""In which object a function lets a model act: one that shows something else once it was told the choice.

Whoever is told what a model chose without gradients, shows what the next choice is made of, and answers
something that is kept as the choice is, is an environment, whatever it and its methods are called: `rewards
= buildings.act(floors)` after `floors = choose(buildings.view())`. The script has to say that being told
changes what is shown: `act` sets `self.place`, which `view` reads; or the answer comes back to the function
as what the next choice is made of, `seen = play(board, seen)`. A scaler or a tokenizer stays as it is,
what scores predictions shows the model nothing of them, what a cache answers goes on into the model, and a
memory of experience answers nothing at all.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diagnose.source.calling import bound, callee, calls_of, given_to
from diagnose.source.effects import Effects, methods_called
from diagnose.source.kinds import Scope
from diagnose.source.names import words
from diagnose.source.parts import Anchors, Part
from diagnose.source.purposes import ENVIRONMENT, ROLLOUT
from diagnose.source.reads_writes import MODULES, closure, reads, reads_in, writes
from diagnose.source.rollouts import measures, turns_of
from diagnose.source.sites import Line, Sample, Stack, without_gradients
from diagnose.source.sources import Sources
from diagnose.source.statements import functions_of, header_lines, innermost_of, statements_of, yields

BOOKS = {"log", "logger", "logging", "wandb", "writer", "tracker", "metrics", "meter", "print"}
"""Words of what is told for the record."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An environment, as one function uses it.

    Attributes:
        tells: The statement that tells it what was chosen.
        chooses: The statements on the way from what it shows to what it is told, the model's calls among
            them.
        base: What it is called there.
    """

    tells: ast.stmt
    chooses: tuple[ast.stmt, ...]
    base: str

    def methods(self, statement: ast.stmt) -> set[str]:
        """Returns the methods of the environment that a statement calls."""
        called = map(callee, calls_of(statement))
        return {name for name, base in called if base == self.base}


class Exchanges:
    """The environments that the functions of a script act in."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._told: dict[Line, set[str]] = {}
        self._chooses: set[Line] = set()

    def read(
        self, samples: Iterable[Sample], sources: Sources, learns: Mapping[str, Sequence[tuple[int, str]]]
    ) -> None:
        """Looks in the functions through which models are called without gradients for who is told what
        they chose.
        `learns` has of each file the lines from which hooks were entered, and kinds.
        """
        scopes: dict[str, list[Scope]] = {}
        by_function: dict[tuple[str, int], set[int]] = {}
        for file, line, _ in sorted(without_gradients(samples)):
            tree = sources.tree(file)
            if tree is None:
                continue
            if file not in scopes:
                scopes[file] = list(functions_of(tree))
            by_function.setdefault((file, innermost_of(scopes[file], line)), set()).add(line)
        for (file, index), lines in by_function.items():
            part = Part(file, scopes[file][index], Anchors(), self._effects)
            found = exchange_in(part, lines, {line for line, _ in learns.get(file, ())}, scopes[file])
            if found is None:
                continue
            for statement in part.statements:
                told = found.methods(statement) | ({""} if statement is found.tells else set())
                for place in part.lines(statement) if told else ():
                    self._told.setdefault(place, set()).update(told)
            self._chooses.update(part.lines(*found.chooses))

    def serves(self, stack: Stack) -> str:
        """Returns what a stack serves: `ENVIRONMENT`, `ROLLOUT`, or nothing.

        Who calls the environment can measure what was learned. What the environment or the model does
        inside may be called so, too: a position is evaluated, a move is validated.
        """
        if not self._told:
            return ""
        for depth, (file, line, _) in enumerate(stack):
            called = stack[depth - 1][2].rpartition(".")[2] if depth else ""
            tells = called in self._told.get((file, line), ())
            if tells or (file, line) in self._chooses:
                measured = measures(function for _, _, function in stack[depth:])
                return "" if measured else ENVIRONMENT if tells else ROLLOUT
        return ""


def exchange_in(
    part: Part, lines: set[int], learns: set[int], scopes: Iterable[Scope] = ()
) -> Exchange | None:
    """Returns the environment that a function acts in; `None` where there is none.

    Args:
        lines: Its lines through which models are called without gradients.
        learns: Its lines from which batches are asked, models called with gradients, and backward passes
            and optimizers' steps begun.
        scopes: The functions that may call it.
    """
    for tells, call, changed in _told(part, learns):
        base = callee(call)[1]
        turns = turns_of(tells, ())
        given = reads_in(*given_to(call))
        given |= reads_in(*(turns[name] for name in given & turns.keys()))
        way, _ = part.walk([(tells, given)])
        others = [s for s in part.statements if s is not tells]
        chooses = [s for s in others if id(s) in way and _chooses(s, lines, base)]
        if not chooses:
            continue
        fed, names = part.walk([(s, part.reads[id(s)]) for s in chooses])
        shows = [s for s in others if s in chooses or id(s) in fed]
        answer = writes(tells) - names  # what goes on into the model is no answer to it
        if not answer:
            continue
        answered = part.spread({id(tells): answer}, ())
        puts = [s for s in others if s not in chooses and _puts(s)]
        if not _shows(shows, base, changed, part.effects):
            if part.from_outside(names).isdisjoint(_given_back(part, answered, scopes)):
                continue
            puts = [s for s in puts if not isinstance(s, ast.Return)]  # that only shows what comes next
        chosen = part.spread({id(s): writes(s) for s in chooses}, {id(tells)})
        if all(any(id(s) in kept for s in puts) for kept in (chosen, answered)):
            return Exchange(tells, tuple(chooses), base)
    return None


def _told(part: Part, learns: set[int]) -> Iterator[tuple[ast.Assign, ast.Call, set[str]]]:
    """Yields the statements that keep what an object answers, the calls that tell it something, and what of
    its attributes that changes: of no module, nor who trains."""
    effects = part.effects
    changes: dict[str, set[str]] = {}
    for statement in part.statements:
        if not isinstance(statement, ast.Assign) or not learns.isdisjoint(header_lines(statement)):
            continue
        for call in calls_of(statement):
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in effects.functions:
                continue
            name, base = callee(call)
            if not base.replace(".", "").isidentifier() or base.partition(".")[0] in MODULES:
                continue
            if base == "self" or effects.is_module(base) or effects.computes(name):
                continue
            if name not in changes:
                changes[name] = _changes(name, effects)
            if changes[name]:
                yield statement, call, changes[name]


def _chooses(statement: ast.stmt, lines: set[int], base: str) -> bool:
    """Whether time passed without gradients in a statement, and not in the environment alone."""
    if lines.isdisjoint(header_lines(statement)):
        return False
    return not all(callee(call)[1] == base for call in calls_of(statement))


def _shows(statements: Iterable[ast.stmt], base: str, changed: set[str], effects: Effects) -> bool:
    """Whether one of some statements calls what has to do with certain attributes of an object."""
    return any(
        called == base and changed & _looks_at(name, effects)
        for statement in statements
        for name, called in methods_called(statement)
    )


def _given_back(part: Part, answered: Container[int], scopes: Iterable[Scope]) -> set[str]:
    """Returns the parameters that callers of a function give what it returned to them, if that is made of
    the statements `answered`: `seen` of `play(board, seen)`, called as `seen = play(board, seen)`."""
    function = part.function
    if isinstance(function, ast.Module):
        return set()
    if not any(isinstance(s, ast.Return) and id(s) in answered for s in part.statements):
        return set()
    return {
        parameter
        for scope in scopes
        for statement in statements_of(scope)
        for call in calls_of(statement)
        if callee(call)[0] == function.name
        for parameter, given in bound(call, function)
        if reads_in(given) & writes(statement)
    }


def _looks_at(method: str, effects: Effects) -> set[str]:
    """Returns the attributes of its object that a method reads or sets, but for those of
    which it only calls methods."""
    statements = (s for s in _run_by(method, effects) if not _calls_only(s))
    return _attributes(each for s in statements for each in reads(s) | writes(s))


def _changes(method: str, effects: Effects) -> set[str]:
    """Returns the attributes of its object that a method sets, or calls methods of that can only change
    them: `self.board.push(move)`."""
    statements = _run_by(method, effects)
    pushed = (callee(call)[1] for s in statements if _calls_only(s) for call in calls_of(s)[:1])
    return _attributes([*pushed, *(each for s in statements for each in writes(s))])


def _run_by(method: str, effects: Effects) -> list[ast.stmt]:
    """Returns the statements of a method, and of the others of its object that it calls."""

    def bodies(names: Iterable[str]) -> Iterator[ast.stmt]:
        for name in names:
            for _, function in effects.functions.get(name, ()):
                yield from statements_of(function)

    def more(known: set[str]) -> Iterator[str]:
        return (name for s in bodies(known) for name, base in methods_called(s) if base == "self")

    return list(bodies(closure({method}, more)))


def _attributes(names: Iterable[str]) -> set[str]:
    """Returns the attributes of an object itself: `self.board`, of `self.board.squares[e4]`."""
    return {".".join(name.partition("[")[0].split(".")[:2]) for name in names if name.startswith("self.")}


def _calls_only(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _puts(statement: ast.stmt) -> bool:
    """Whether a statement puts something somewhere, or gives it back: not what only counts, asks in a
    condition, or writes into a log."""
    if {word for call in calls_of(statement) for each in callee(call) for word in words(each)} & BOOKS:
        return False
    if isinstance(statement, (ast.Return, ast.Expr)):
        return True
    return yields(statement) or any("." in name or "[" in name for name in writes(statement))
