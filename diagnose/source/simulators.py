"""Which functions of a file say what follows on a state and an action, and ask no model for it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence

from diagnose.source.rollouts import (
    ENVIRONMENTS,
    EVALUATES,
    LEARNERS,
    LEARNS,
    LEARNT,
    TRAINING_WORDS,
)
from diagnose.source.statements import names, words, words_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef

SIMULATES = ENVIRONMENTS - {"world"} | {"simulate", "transition", "dynamics"}
"""Words of such functions. A world may be a model."""

OTHERS = LEARNS | LEARNERS | EVALUATES | TRAINING_WORDS | LEARNT | {"benchmark"}
"""Words of those that do something else, whatever the rest of their words."""

ASKS = {"forward", "generate", "predict"}
"""Methods of models."""


def simulators_of(tree: ast.Module) -> frozenset[str]:
    """Returns the functions of a file, other than methods, that are called what simulates, and that surely
    ask no model: what a learned model imagines is no environment."""
    methods = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    functions: dict[str, list[Definition]] = {}
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, Definition) and id(node) not in methods:
            functions.setdefault(node.name, []).append(node)
    return frozenset(
        name
        for name in functions
        if words(name) & SIMULATES and not words(name) & OTHERS
        if not _may_ask_model(name, functions, imported)
    )


def _may_ask_model(name: str, functions: Mapping[str, Sequence[Definition]], imported: set[str]) -> bool:
    """Whether a function, or another one of the file that it calls, may call a model: a name that holds
    neither a function nor a class, or what is called one."""
    seen, pending = set[str](), [name]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for call in (node for each in functions[current] for node in ast.walk(each)):
            if not isinstance(call, ast.Call):
                continue
            if isinstance(call.func, ast.Name):
                called = call.func.id
                if called in functions:
                    pending.append(called)
                elif not (called in imported or hasattr(builtins, called) or called[:1].isupper()):
                    return True
            elif not isinstance(call.func, ast.Attribute) or _is_of_model(call.func):
                return True
    return False


def _is_of_model(method: ast.Attribute) -> bool:
    """Whether a method is an object's own, or that of what is called a model, or one of a model."""
    used = names(ast.walk(method.value))
    return "self" in used or method.attr in ASKS or bool(words_of(used) & LEARNT)
