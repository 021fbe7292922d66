"""In which object a function lets a model act: one that shows something else once it was told the choice.

Whoever is told what a model chose without gradients, shows what the next choice is made of, and answers
something that is kept as the choice is, is an environment, whatever it and its methods are called: `rewards
= buildings.act(floors)` after `floors = choose(buildings.view())`. The script has to say that being told
changes what is shown: `act` sets `self.place`, which `view` reads; or the answer comes back to the function
as what the next choice is made of, `seen = play(board, seen)`. A scaler or a tokenizer stays as it is,
what scores predictions shows the model nothing of them, what a cache answers goes on into the model, and a
memory of experience answers nothing at all.

Nor need it be an object: `board = drop(board, column)` takes what it was and answers what it is now, and
the next choice is made of that. And it may be the one who calls: see `askers`. With these, something has
to be drawn or taken by what the model said: a picture that a sampler goes on from is no choice.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diagnose.source.askers import (
    asking_lines,
    asks_in_itself,
    attributes_of,
    class_around,
    class_of,
    puts,
)
from diagnose.source.calling import bound, callee, calls_of, given_to
from diagnose.source.effects import Effects, methods_called
from diagnose.source.kinds import Assignment, Scope
from diagnose.source.parts import Anchors, Part
from diagnose.source.purposes import ENVIRONMENT, ROLLOUT
from diagnose.source.reads_writes import MODULES, closure, reads, reads_in, writes
from diagnose.source.rollouts import measures, turns_of
from diagnose.source.sites import Line, Sample, Stack, without_gradients
from diagnose.source.sources import Sources
from diagnose.source.statements import functions_of, header_lines, innermost_of, statements_of


@dataclass(frozen=True, slots=True)
class Exchange:
    """An environment, as one function uses it.

    Attributes:
        tells: The statement that tells it what was chosen.
        chooses: The statements on the way from what it shows to what it is told, the model's calls among
            them.
        base: What it is called there; empty where it is made of functions.
        state: The names that hold it then.
    """

    tells: ast.stmt
    chooses: tuple[ast.stmt, ...]
    base: str
    state: frozenset[str] = frozenset()

    def methods(self, statement: ast.stmt, effects: Effects) -> set[str]:
        """Returns the methods of the environment that a statement calls, or the functions of the script
        that it gives its state to; of these none where the model chooses by it."""
        if not self.base and statement in self.chooses:
            return set()
        if self.base:
            return _asked(statement, self.base)
        return _given(statement, self.state, "", effects)


class Exchanges:
    """The environments that the functions of a script act in."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._told: dict[Line, set[str]] = {}
        self._chooses: set[Line] = set()
        self._holds: set[tuple[str, str]] = set()

    def read(
        self, samples: Sequence[Sample], sources: Sources, learns: Mapping[str, Sequence[tuple[int, str]]]
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
        asking = asking_lines(samples, scopes)
        for (file, index), lines in by_function.items():
            part = Part(file, scopes[file][index], Anchors(), self._effects)
            anchors = {line for line, _ in learns.get(file, ())}
            asks = {line: asking[file][line] for line in asking[file].keys() & lines}
            found = exchange_in(part, lines, anchors, scopes[file], asks)
            if found is None:
                own = class_around(part.function, sources.tree(file)) if asks else None
                if own is not None and anchors.isdisjoint(range(own.lineno, (own.end_lineno or 0) + 1)):
                    chooses = asks_in_itself(part, asks)
                    self._holds.update({(file, own.name)} if chooses else ())
                    self._chooses.update(part.lines(*chooses))
                continue
            for statement in part.statements:
                told = found.methods(statement, self._effects) | (
                    {""} if statement is found.tells else set()
                )
                for place in part.lines(statement) if told else ():
                    self._told.setdefault(place, set()).update(told)
            self._chooses.update(part.lines(*found.chooses))

    def serves(self, stack: Stack) -> str:
        """Returns what a stack serves: `ENVIRONMENT`, `ROLLOUT`, or nothing.

        Who calls the environment can measure what was learned. What the environment or the model does
        inside may be called so, too: a position is evaluated, a move is validated.
        """
        if not (self._told or self._holds):
            return ""
        for depth, (file, line, _) in enumerate(stack):
            called = stack[depth - 1][2].rpartition(".")[2] if depth else ""
            tells = called in self._told.get((file, line), ())
            chooses = (file, line) in self._chooses
            tells = tells or (not chooses and (file, class_of(stack[depth][2])) in self._holds)
            if tells or chooses:
                measured = measures(function for _, _, function in stack[depth:])
                return "" if measured else ENVIRONMENT if tells else ROLLOUT
        return ""


def exchange_in(
    part: Part, lines: set[int], learns: set[int], scopes: Iterable[Scope], asks: Mapping[int, set[str]]
) -> Exchange | None:
    """Returns the environment that a function acts in; `None` where there is none.

    Args:
        lines: Its lines through which models are called without gradients.
        learns: Its lines from which batches are asked, models called with gradients, and backward passes
            and optimizers' steps begun.
        scopes: The functions that may call it.
        asks: Those of `lines` from which models are surely called, or that say so; see `asking_lines`.
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
        state = writes(tells) & reads_in(*given_to(call)) & names
        if id(tells) not in fed:  # what each turn or call has another of is none: a batch, `x = cut(x, at)`
            state = {name for name in state if name.startswith("self.")}
        if state or isinstance(tells, ast.Expr):
            if not any(_passes(s, asks) for s in chooses) or not part.decides(chooses, [tells], asks):
                continue
            # An error of what is learned is no choice: a memory is told by it what to draw.
            if any(id(s) in way and not learns.isdisjoint(header_lines(s)) for s in others):
                continue
        if isinstance(tells, ast.Expr):
            after = [s for s in _after(tells, part) if _shows([s], base, changed, part.effects)]
            answers = {id(s): writes(s) for s in after}
        else:  # what goes on into the model is no answer to it, but what else is asked of that may be
            answer = writes(tells) - (state or names)
            answers = {id(tells): answer} if answer else {}
            beside = (s for s in others if state and s not in chooses and id(s) not in fed)
            answers.update({id(s): writes(s) for s in beside if _makes_of(s, state, base, part.effects)})
        if not answers:
            continue
        # Who goes on from its own choices, as a writer of texts, has no answer but these.
        own = {id(s) for s in chooses if state or isinstance(tells, ast.Expr)}
        answered = part.spread(answers, own, same_turn=isinstance(tells, ast.Expr))
        kept = [s for s in others if s not in chooses and puts(s)]
        if not state and not _shows(shows, base, changed, part.effects):
            if part.from_outside(names).isdisjoint(_given_back(part, answered, scopes)):
                continue
            kept = [s for s in kept if not isinstance(s, ast.Return)]  # that only shows what comes next
        chosen = part.spread({id(s): writes(s) for s in chooses}, {id(tells)})
        if all(any(id(s) in held for s in kept) for held in (chosen, answered)):
            return Exchange(tells, tuple(chooses), base, frozenset(state))
    return None


def _after(statement: ast.stmt, part: Part) -> list[ast.stmt]:
    """Returns the statements that come after one in the same turn of its loop."""
    loops = part.blocks.loops(statement)
    return [s for s in part.statements if s.lineno > statement.lineno and part.blocks.loops(s) == loops]


def _told(part: Part, learns: set[int]) -> Iterator[tuple[ast.Assign | ast.Expr, ast.Call, set[str]]]:
    """Yields the statements that keep what an object answers, or only tell it something, the calls that do,
    and what of its attributes changes: of no module, nor who trains. And those that keep what a function
    or method makes of what it is given, in its place."""
    effects = part.effects
    changes: dict[str, set[str]] = {}
    for statement in part.statements:
        if not isinstance(statement, (ast.Assign, ast.Expr)) or not learns.isdisjoint(
            header_lines(statement)
        ):
            continue
        for call in calls_of(statement):
            name, base = callee(call)
            if name not in effects.functions or effects.computes(name):
                continue
            if base and (not base.replace(".", "").isidentifier() or base.partition(".")[0] in MODULES):
                continue
            if base == "self" or effects.is_module(base):
                continue
            if name not in changes:
                changes[name] = _changes(name, effects)
            goes_on = isinstance(statement, ast.Assign) and writes(statement) & reads_in(*given_to(call))
            if (base and changes[name]) or goes_on:
                yield statement, call, changes[name]


def _passes(statement: ast.stmt, lines: Mapping[int, set[str]]) -> bool:
    """Whether a statement calls something on one of some lines."""
    return bool(calls_of(statement)) and bool(lines.keys() & set(header_lines(statement)))


def _chooses(statement: ast.stmt, lines: set[int], base: str) -> bool:
    """Whether time passed without gradients in a statement, and not in the environment alone."""
    if lines.isdisjoint(header_lines(statement)):
        return False
    return not base or not all(callee(call)[1] == base for call in calls_of(statement))


def _shows(statements: Iterable[ast.stmt], base: str, changed: set[str], effects: Effects) -> bool:
    """Whether one of some statements asks an object what has to do with certain attributes of it, or reads
    one."""
    return bool(base) and any(
        changed & (_looks_at(name, effects) if name in effects.functions else {f"self.{name}"})
        for statement in statements
        for name in _asked(statement, base)
    )


def _makes_of(statement: ast.stmt, state: Collection[str], base: str, effects: Effects) -> bool:
    """Whether a statement makes something else of a state, or asks a function for it, and does not only
    hand it on: `reward = -board[3].sum()`."""
    makes = isinstance(statement, Assignment) and not isinstance(statement.value, ast.Name)
    read = makes and not reads(statement).isdisjoint(state)
    return read or bool(_given(statement, state, base, effects))


def _given(statement: ast.stmt, state: Collection[str], base: str, effects: Effects) -> set[str]:
    """Returns the functions of the script, or methods of one object, that a statement gives a state."""
    return {
        name
        for call in calls_of(statement)
        for name, of in (callee(call),)
        if of in ("", base) and name in effects.functions
        if not reads_in(*given_to(call)).isdisjoint(state)
    }


def _asked(statement: ast.stmt, base: str) -> set[str]:
    """Returns the methods and properties of an object that a statement calls and reads."""
    read = (name.removeprefix(f"{base}.") for name in reads(statement) if name.startswith(f"{base}."))
    called = (name for name, of in methods_called(statement) if of == base)
    return {*called, *(name.partition(".")[0].partition("[")[0] for name in read)}


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
    return attributes_of(each for s in statements for each in reads(s) | writes(s))


def _changes(method: str, effects: Effects) -> set[str]:
    """Returns the attributes of its object that a method sets, or calls methods of that can only change
    them: `self.board.push(move)`."""
    statements = _run_by(method, effects)
    pushed = (callee(call)[1] for s in statements if _calls_only(s) for call in calls_of(s)[:1])
    return attributes_of([*pushed, *(each for s in statements for each in writes(s))])


def _run_by(method: str, effects: Effects) -> list[ast.stmt]:
    """Returns the statements of a method, and of the others of its object that it calls."""

    def bodies(names: Iterable[str]) -> Iterator[ast.stmt]:
        for name in names:
            for _, function in effects.functions.get(name, ()):
                yield from statements_of(function)

    def more(known: set[str]) -> Iterator[str]:
        return (name for s in bodies(known) for name, base in methods_called(s) if base == "self")

    return list(bodies(closure({method}, more)))


def _calls_only(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
