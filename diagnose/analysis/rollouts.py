"""Which statements step the environment of a reinforcement learner, and which loops act in it."""

from __future__ import annotations

import ast

from diagnose.analysis.statements import Place, callee, nodes_of, reads, words, writes

ENVIRONMENTS = {
    "env",
    "envs",
    "venv",
    "environment",
    "environments",
    "game",
    "gym",
    "sim",
    "simulator",
    "world",
}
"""Words of what an environment is called."""

ADVANCES = {"step", "reset", "recv", "step_wait"}

EVALUATES = {"eval", "evaluate", "evaluation", "evaluator", "test", "val", "validate", "validation"}
"""Words of functions and environments that measure what was learned."""

LEARNS = {"backward", "learn", "train", "update", "optimize", "fit"}
"""Words of functions that learn from what was collected."""

LEAST_RESULTS = 3
"""An environment's step returns an observation, a reward and an end at least; no optimizer's does."""


def steps_environment(statement: ast.stmt) -> bool:
    """Whether a statement steps an environment, or resets it, in order to learn from that.

    It is told by what the environment is called, or by what is taken of its step: `obs, reward, done`.
    """
    for node in nodes_of(statement):
        if not isinstance(node, ast.Call):
            continue
        name, base = callee(node)
        of_base = words(base)
        if of_base & EVALUATES or not base or name not in ADVANCES:
            continue
        if of_base & ENVIRONMENTS and not of_base & {"opt", "optim", "optimizer", "scheduler", "scaler"}:
            return True
        if name == "step" and node.args and _results(statement, node) >= LEAST_RESULTS:
            return True
    return False


def collects(place: Place) -> bool:
    """Whether a statement serves to collect experience: it acts, in a loop that steps an environment.

    Where that loop learns, too, only what the environment's next step depends on is for it.
    """
    if not place.loops:
        return False
    inside = [node for node in ast.walk(place.loops[0]) if isinstance(node, ast.stmt)]
    steps = [statement for statement in inside if steps_environment(statement)]
    if not steps or not any(map(_learns, inside)):
        return bool(steps)
    wanted: set[str] = set()
    pending = steps
    while pending:
        wanted.update(*(reads(statement) for statement in pending))
        inside = [statement for statement in inside if statement not in pending]
        pending = [statement for statement in inside if writes(statement) & wanted]
    return bool(writes(place.statement) & wanted)


def _learns(statement: ast.stmt) -> bool:
    called = (callee(node)[0] for node in nodes_of(statement) if isinstance(node, ast.Call))
    return any(words(name) & LEARNS for name in called)


def _results(statement: ast.stmt, call: ast.Call) -> int:
    """Returns how many results of a call a statement takes apart."""
    if not isinstance(statement, ast.Assign) or statement.value is not call:
        return 0
    target = statement.targets[0]
    return len(target.elts) if isinstance(target, ast.Tuple) else 0
