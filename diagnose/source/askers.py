"""Simulations that ask a policy what to do: environments that call the model, and are not called by it.

`self.heights[self.choose(self.heights)] += 1` in a method, of an object with which nothing is learned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from diagnose.source.calling import callee, calls_of
from diagnose.source.kinds import Definition, Scope, With
from diagnose.source.names import names_in, words
from diagnose.source.parts import Part
from diagnose.source.reads_writes import writes
from diagnose.source.sites import Sample
from diagnose.source.statements import all_lines, header_lines, nodes_within, statements_of, yields

QUIET = {"no_grad", "inference_mode"}

BOOKS = {"log", "logger", "logging", "wandb", "writer", "tracker", "metrics", "meter", "print"}
"""Words of what is told for the record."""


def asking_lines(
    samples: Iterable[Sample], scopes: Mapping[str, Iterable[Scope]]
) -> dict[str, dict[int, set[str]]]:
    """Returns by file the lines from which models may be asked without gradients, those that say so, and
    those through which they, or the `forward` of a module, were seen to be called; and the functions that
    were seen to be called from each."""
    quiet = {file: _quiet_lines(of_file) for file, of_file in scopes.items()}
    found: dict[str, dict[int, set[str]]] = {
        file: {n: set() for n in lines} for file, lines in quiet.items()
    }
    for _, _, (_, *stack), _ in samples:
        inside, called = False, ""
        for file, line, function in stack:
            if file in found and (inside or line in quiet[file]):
                found[file].setdefault(line, set()).update({called} - {""})
            called = function.rpartition(".")[2]
            inside = inside or line in quiet.get(file, ()) or called == "forward"
    return found


def _quiet_lines(scopes: Iterable[Scope]) -> set[int]:
    """Returns the lines of functions, or of parts of them, that say that they compute without gradients."""
    blocks: list[ast.stmt] = []
    for scope in scopes:
        blocks += (
            s
            for s in statements_of(scope)
            if isinstance(s, With) and _says(i.context_expr for i in s.items)
        )
        if isinstance(scope, Definition) and _says(scope.decorator_list):
            blocks.append(scope)
    return {line for block in blocks for line in all_lines(block)}


def _says(expressions: Iterable[ast.expr]) -> bool:
    return bool(names_in(*expressions) & QUIET)


def asks_in_itself(part: Part, lines: Mapping[int, set[str]]) -> list[ast.stmt]:
    """Returns the statements of a method, of those on certain lines, that ask a model what to do to the
    method's own object, and show it what that changes; none where it keeps not both, the choice and what
    came of it.

    What only replaces values of the object by the model's, as a sampler's chains, changes none by a choice.
    """
    chooses = [s for s in part.statements if lines.keys() & set(header_lines(s)) and writes(s)]
    _, names = part.walk([(s, part.reads[id(s)]) for s in chooses])
    shown = attributes_of(names) - attributes_of(
        ast.unparse(call.func) for s in chooses for call in calls_of(s)
    )
    chosen = part.spread({id(s): writes(s) for s in chooses}, ())

    def changes_shown(statement: ast.stmt) -> bool:
        through = part.writes[id(statement)] - writes(statement)
        before = attributes_of(part.reads[id(statement)] | through)
        return bool(shown & attributes_of(part.writes[id(statement)]) & before)

    changes = [s for s in part.statements if id(s) in chosen and s not in chooses and changes_shown(s)]
    answered = part.spread({id(s): part.writes[id(s)] for s in changes}, {id(s) for s in chooses})
    chosen = part.spread({id(s): writes(s) for s in chooses}, {id(s) for s in changes})
    others = [s for s in part.statements if s not in chooses and s not in changes and puts(s)]
    kept = all(any(id(s) in held for s in others) for held in (chosen, answered))
    return chooses if changes and kept and part.decides(chooses, changes, lines) else []


def class_around(function: Scope, tree: ast.Module | None) -> ast.ClassDef | None:
    """Returns the class that a function is a method of."""
    nodes = () if tree is None else nodes_within(tree)
    return next((node for node in nodes if isinstance(node, ast.ClassDef) and function in node.body), None)


def class_of(function: str) -> str:
    """Returns the class that a frame's function is a method of: `Yard`, of `main.<locals>.Yard.run`."""
    return function.rpartition(".")[0].rpartition(".")[2]


def attributes_of(names: Iterable[str]) -> set[str]:
    """Returns the attributes of an object itself: `self.board`, of `self.board.squares[e4]`."""
    return {".".join(name.partition("[")[0].split(".")[:2]) for name in names if name.startswith("self.")}


def puts(statement: ast.stmt) -> bool:
    """Whether a statement puts something somewhere, or gives it back: not what only counts, asks in a
    condition, or writes into a log."""
    if {word for call in calls_of(statement) for each in callee(call) for word in words(each)} & BOOKS:
        return False
    if isinstance(statement, (ast.Return, ast.Expr)):
        return True
    return yields(statement) or any("." in name or "[" in name for name in writes(statement))
