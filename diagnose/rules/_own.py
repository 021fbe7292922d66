"""Rules from packages of the user's, found by their entry points."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from diagnose.core.plugins import only_subclass
from diagnose.rules.base import Rule

GROUP = "diagnose.rules"
"""The entry point group: `rule-name = "package.module"`, or `"package.module:Class"`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRules:
    """What the installed packages add.

    Attributes:
        rules: Their rules, by the name of the entry point.
        broken: Of each that could not be loaded, why, in a sentence.
        clashes: Of each whose name is taken, by what, in a sentence.
    """

    rules: Mapping[str, Rule]
    broken: tuple[str, ...] = ()
    clashes: tuple[str, ...] = ()


def own_rules(taken: Collection[str]) -> OwnRules:
    """Loads the rules of installed packages; one that cannot be loaded does not stop the others.

    Args:
        taken: Names of the built-in rules.
    """
    found: dict[str, Rule] = {}
    broken: list[str] = []
    clashes: list[str] = []
    # An editable installation may list an entry point twice.
    entries = {(entry.name, entry.value): entry for entry in entry_points(group=GROUP)}
    for (name, value), entry in sorted(entries.items()):
        if name in taken or name in found:
            other = "a built-in rule has" if name in taken else "another package's rule has"
            clashes.append(
                f"rule {name} of {_package(entry)} ({value}) is left out: {other} that name. "
                "Give its entry point another name."
            )
            continue
        try:
            found[name] = _loaded(entry)
        except Exception as error:  # noqa: BLE001 - a stranger's code: the other rules are still asked
            broken.append(
                f"rule {name} of {_package(entry)} could not be loaded: {type(error).__name__}: {error}"
            )
    return OwnRules(rules=found, broken=tuple(broken), clashes=tuple(clashes))


def _loaded(entry: EntryPoint) -> Rule:
    target = entry.load()
    if inspect.ismodule(target):
        return only_subclass(target, Rule)()  # type: ignore[type-abstract]
    if inspect.isclass(target) and issubclass(target, Rule):
        return target()
    raise TypeError(f"{entry.value} is neither a module with one Rule nor a Rule")


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an installed package"
