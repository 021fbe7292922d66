"""What the pages of a rule are made of: its text, its thresholds, and one example, run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms
from diagnose.rules import Rule, ask_one, base


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A number that a rule judges by: its name, its value as written, and the reason for it."""

    name: str
    value: str
    reason: str


def thresholds(rule: Rule) -> list[Threshold]:
    """Returns the named numbers, with their reasons, of the files of a rule and of its bases, and which of
    those that all rules share these use."""
    family = type(rule).__mro__
    found = [inspect.getmodule(one) for one in family[: family.index(Rule)]]
    modules = [module for module in dict.fromkeys(found) if module is not None]
    shared = [
        number for number in _numbers_of(base) if any(number.name in vars(module) for module in modules)
    ]
    own = [number for module in modules for number in _numbers_of(module)]
    return list({number.name: number for number in (*shared, *own)}.values())


def example(rule: Rule) -> tuple[str, Finding, Profile] | None:
    """Runs a rule on its first example; returns the example in words, the finding, and the profile."""
    for profile in rule.fires_on[:1]:
        finding = ask_one(rule, profile)
        if finding is not None:
            return _in_words(profile), finding, profile
    return None


def _in_words(profile: Profile) -> str:
    spent = sorted(
        (phase for phase in Phase if profile.phase_time_ns.get(phase)),
        key=lambda phase: -profile.phase_time_ns[phase],
    )
    parts = ", ".join(f"{phase.label} {format_ms(profile.phase_time_ns[phase])}" for phase in spent)
    return f"Of a run with steps of {format_ms(profile.step_time_ns)} ({parts}) the rule says:"


def _numbers_of(module: ModuleType) -> Iterator[Threshold]:
    for name, value, reason in _documented(ast.parse(inspect.getsource(module)).body):
        if _is_number(value):
            values = value.elts if "," in name and isinstance(value, ast.Tuple) else [value]
            yield Threshold(name=name, value=", ".join(map(ast.unparse, values)), reason=reason)


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, str]]:
    for statement, after in pairwise(body):
        text = after.value if isinstance(after, ast.Expr) else None
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        target = statement.target if isinstance(statement, ast.AnnAssign) else target
        value = getattr(statement, "value", None)
        if isinstance(target, (ast.Name, ast.Tuple)) and isinstance(value, ast.expr):
            yield ast.unparse(target).strip("()"), value, " ".join(text.value.split())


def _is_number(value: ast.expr) -> bool:
    """Whether it is a number, or a few; a name in it, but `inf`, means that it is not plain to read."""
    numbers = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.USub, ast.BinOp, ast.operator, ast.Load)
    constants = [node for node in ast.walk(value) if isinstance(node, ast.Constant)]
    nodes = [node for node in ast.walk(value) if not (isinstance(node, ast.Name) and node.id == "inf")]
    return all(isinstance(node, numbers) for node in nodes) and all(
        isinstance(node.value, int | float) and not isinstance(node.value, bool) for node in constants
    )
