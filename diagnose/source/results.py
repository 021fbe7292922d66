"""Where what a model has computed goes to: the code that works on it and trains nothing scores it.

The loop's own statements say which names hold it (`Roles`); a sampled stack says which functions were
called from there, and their arguments what they were given.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping

from diagnose.source.calling import bound, callee, is_call, parameters_of
from diagnose.source.kinds import Scope
from diagnose.source.places import Places
from diagnose.source.reads_writes import grow, reads, reads_in
from diagnose.source.scores import uses_of
from diagnose.source.sites import Frame, Stack
from diagnose.source.statements import nodes_of, statements_of

INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
"""Functions that are a part of the statement which they stand in."""

HANDS_OVER = {"send", "send_bytes", "send_pyobj", "put", "put_nowait"}


class Results:
    """Answers whether a line works on what a model has computed. Through a file without text nothing is
    followed."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._known: dict[tuple[tuple[str, int], ...], bool] = {}

    def reach(
        self,
        stack: Stack,
        held: Collection[str],
        kept: Collection[str],
        lost: Mapping[str, Collection[str]],
    ) -> bool:
        """Whether results reach the innermost line of a stack.

        Args:
            stack: Up to the loop's own frame.
            held: Names that hold results there.
            kept: Names of which batches are made. What is given to those trains.
            lost: By the names of objects with a loss in them, what of these it is: `out.loss`, of `out`.
                Who reads only that scores nothing.
        """
        frames = [frame for frame in stack if not frame[2].endswith(INLINE)] or list(stack[-1:])
        key = tuple((file, line) for file, line, _ in (stack[0], *frames))
        if key not in self._known:
            parts = {name: {part.removeprefix(name) for part in of} for name, of in lost.items()}
            self._known[key] = self._reach(stack[0], frames, set(held), set(kept), parts)
        return self._known[key]

    def _reach(
        self, last: Frame, frames: Stack, held: set[str], kept: set[str], lost: Mapping[str, set[str]]
    ) -> bool:
        if any(callee(call)[1] in kept for call in self._places.calls(*frames[-1][:2])):
            return False
        for outer, inner in zip(frames[:0:-1], frames[-2::-1], strict=True):
            function = self._places.scope(*inner[:2])
            calls = _named_or_all(self._places.calls(*outer[:2]), inner[2].rpartition(".")[2])
            if function is None or not calls:
                return False
            held = set().union(*(_received(call, function, held) for call in calls))
            lost = _lost_inside(calls, function, lost)
            grow(held, [s for s in statements_of(function) if not _reads_loss_alone(s, held, lost)])
        statements = (place.statement for place in self._places.at(*last[:2]))
        return any(
            reads(s) & held and not _hands_over(s) and not _reads_loss_alone(s, held, lost)
            for s in statements
        )


def _named_or_all(calls: list[ast.Call], name: str) -> list[ast.Call]:
    """Returns the calls among which that of a function is: those by its name, or else all of them."""
    return [call for call in calls if is_call(call, {name})] or calls


def _hands_over(statement: ast.stmt) -> bool:
    """Whether a statement only gives what it has to another process or thread."""
    return isinstance(statement, ast.Expr) and is_call(statement.value, HANDS_OVER)


def _received(call: ast.Call, function: Scope, held: set[str]) -> set[str]:
    """Returns the names that hold, in a function, what it was given of it."""
    if isinstance(function, ast.Module):
        return set()
    spec, taken = function.args, parameters_of(function)
    own = taken[:1] == ["self"]
    received: set[str] = set()
    for position, value in enumerate(call.args, start=own):
        rest = taken[position:] if isinstance(value, ast.Starred) else taken[position : position + 1]
        received |= _held_as(value, rest or ([spec.vararg.arg] if spec.vararg else []), held)
    for keyword in call.keywords:
        received |= _held_as(keyword.value, [keyword.arg or (spec.kwarg.arg if spec.kwarg else "")], held)
    base = callee(call)[1]
    if own and base:
        inside = (name.removeprefix(base) for name in held if name.startswith(f"{base}."))
        received.update(f"self{name}" for name in inside)
    if own and base in held:
        used = set().union(*(reads(statement) for statement in statements_of(function)))
        received.update(name for name in used if name.startswith("self."))
    return received


def _lost_inside(
    calls: Iterable[ast.Call], function: Scope, lost: Mapping[str, set[str]]
) -> dict[str, set[str]]:
    """Returns the like by the names that the objects have in a function which was given them."""
    found: dict[str, set[str]] = {}
    if isinstance(function, ast.Module):
        return found
    for call in calls:
        given = [(parameter, ast.unparse(value)) for parameter, value in bound(call, function)]
        if parameters_of(function)[:1] == ["self"]:
            given.append(("self", callee(call)[1]))
        for parameter, value in given:
            for name, parts in lost.items():
                if f"{name}.".startswith(f"{value}."):
                    found.setdefault(parameter + name.removeprefix(value), set()).update(parts)
    return found


def _reads_loss_alone(statement: ast.stmt, held: Collection[str], lost: Mapping[str, set[str]]) -> bool:
    """Whether a statement reads of results only the losses in them: of `out`, `out.loss`."""
    read = reads(statement)
    objects = [name for name in lost if name in read]
    for name in objects:
        parts, whole = uses_of(nodes_of(statement), name)
        if whole or not parts or not {part.removeprefix(name) for part in parts} <= lost[name]:
            return False
        read = {each for each in read if each != name and not each.startswith((f"{name}.", f"{name}["))}
    return bool(objects) and not read & set(held)


def _held_as(value: ast.expr, parameters: Iterable[str], held: set[str]) -> set[str]:
    """Returns which parameters hold results by what a call gives them; of an object that it gives, with
    results in its attributes, these: `loop.out`, of `self.out` in a call with `self`."""
    if reads_in(value) & held:
        return set(parameters)
    given = ast.unparse(value) if isinstance(value, (ast.Name, ast.Attribute)) else ""
    inside = {name.removeprefix(given) for name in held if given and name.startswith(f"{given}.")}
    return {f"{parameter}{name}" for parameter in parameters for name in inside}
