"""Which functions of a file say what follows on a state and an action, and ask no model for it."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Mapping, Sequence

from diagnose.source.calling import calls_in, given_to, is_call
from diagnose.source.kinds import Definition
from diagnose.source.names import names_in, words, words_of
from diagnose.source.rollouts import (
    ENVIRONMENTS,
    EVALUATES,
    LEARNERS,
    LEARNS,
    LEARNT,
    TRAINING_WORDS,
)
from diagnose.source.statements import nodes_within

SIMULATES = ENVIRONMENTS - {"world"} | {"simulate", "transition", "dynamics"}
"""Words of such functions. A world may be a model."""

OTHERS = LEARNS | LEARNERS | EVALUATES | TRAINING_WORDS | LEARNT | {"benchmark"}
"""Words of those that do something else, whatever the rest of their words."""

ASKS = {"forward", "generate", "predict", "functional_call", "checkpoint", "vmap"}
"""Methods of models, and functions that call what they are given."""

WEIGHTS = {"params", "parameters", "weight", "weights", "theta", "w"}
"""Words of parameters of a function that is a model itself: `dynamics(params, state, action)`."""

PLAIN = sys.stdlib_module_names | {"numba", "numpy", "scipy", "torch"}
"""Packages that hold no model of the script's; what else it imports may be one."""


def simulators_of(tree: ast.Module) -> frozenset[str]:
    """Returns the functions of a file, other than methods, that are called what simulates, and that surely
    ask no model: what a learned model imagines is no environment."""
    classes = [node for node in nodes_within(tree) if isinstance(node, ast.ClassDef)]
    methods = {id(each) for node in classes for each in node.body}
    functions: dict[str, list[Definition]] = {}
    plain, foreign = set[str](), set[str]()
    for node in nodes_within(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            package = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                found = plain if (package or alias.name).partition(".")[0] in PLAIN else foreign
                found.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, Definition) and id(node) not in methods:
            functions.setdefault(node.name, []).append(node)
    return frozenset(
        name
        for name in functions
        if words(name) & SIMULATES and not words(name) & OTHERS
        if not _may_ask_model(name, functions, plain - foreign, foreign)
    )


def _may_ask_model(
    name: str, functions: Mapping[str, Sequence[Definition]], plain: set[str], foreign: set[str]
) -> bool:
    """Whether a function, or another one of the file that it calls, may call a model, or be one.

    It may where it is given weights, or calls a name that holds neither a function nor a class, what is
    called a model, or what is given one.

    Args:
        functions: Those of the file, by name.
        plain: What the file imports from where no models are.
        foreign: What else it imports.
    """
    seen, pending = set[str](), [name]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if any(_has_weights(each) for each in functions[current]):
            return True
        for call in calls_in(*functions[current]):
            if is_call(call, ASKS) or words_of(names_in(*given_to(call))) & LEARNT:
                return True
            if isinstance(call.func, ast.Name):
                called = call.func.id
                if called in functions:
                    pending.append(called)
                elif not (called in plain or hasattr(builtins, called) or called[:1].isupper()):
                    return True
            elif not isinstance(call.func, ast.Attribute) or _is_of_model(call.func, foreign):
                return True
    return False


def _has_weights(function: Definition) -> bool:
    """Whether a function has a parameter for weights; those of an environment are none."""
    return any(
        words(each.arg) & WEIGHTS and not words(each.arg) & ENVIRONMENTS
        for each in ast.walk(function.args)
        if isinstance(each, ast.arg)
    )


def _is_of_model(method: ast.Attribute, foreign: set[str]) -> bool:
    """Whether a method is an object's own, or that of what is called a model, or in what may hold one."""
    used = names_in(method.value)
    return "self" in used or bool(used & foreign) or bool(words_of(used) & LEARNT)
