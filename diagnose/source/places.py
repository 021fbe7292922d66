"""The statements of the script's files by line, with what the names there are known to hold."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from diagnose.source.attention import attention_lines
from diagnose.source.call_idioms import WAITED_FOR
from diagnose.source.calling import calls_of, holders_of
from diagnose.source.copied_weights import copied_in
from diagnose.source.files import aliases_of, queries_of, saved_in
from diagnose.source.kinds import Function, Loop, Scope
from diagnose.source.module_hooks import noting_lines
from diagnose.source.place import Place, by_line
from diagnose.source.schedules import given_as_rates, groups_of, rate_setters, rates_of
from diagnose.source.simulators import simulators_of
from diagnose.source.sources import Sources
from diagnose.source.statements import functions_of, innermost_of
from diagnose.source.tensor_values import without_tensors
from diagnose.source.texts import texts_of
from diagnose.source.weight_idioms import helpers_of
from diagnose.source.weights import Weights, averaged_at_once


class _File(NamedTuple):
    places: dict[int, list[Place]]
    functions: dict[str, list[Function]]
    scopes: list[Scope]
    attention: set[int]
    noting: set[int]


class Places:
    """Answers what stands on a line: in a file without text nothing. Each file is looked into once."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._files: dict[str, _File] = {}

    def at(self, file: str, line: int) -> list[Place]:
        """Returns the statements on a line."""
        return self._file(file).places.get(line, [])

    def calls(self, file: str, line: int) -> list[ast.Call]:
        """Returns the calls in the statements on a line."""
        return [call for place in self.at(file, line) for call in calls_of(place.statement)]

    def writes_attention(self, file: str, line: int) -> bool:
        """Whether a line is part of an attention that is written out."""
        return line in self._file(file).attention

    def notes(self, file: str, line: int) -> bool:
        """Whether a line is of a hook of modules that only notes numbers."""
        return line in self._file(file).noting

    def scope(self, file: str, line: int) -> Scope | None:
        """Returns the innermost function around a line, or the module; `None` in a file without text."""
        scopes = self._file(file).scopes
        return scopes[innermost_of(scopes, line)] if scopes else None

    def functions(self, file: str, name: str) -> list[Function]:
        """Returns the functions and methods of a file that have a name."""
        return self._file(file).functions.get(name, [])

    def _file(self, file: str) -> _File:
        if file not in self._files:
            tree = self.sources.tree(file)
            self._files[file] = _File({}, {}, [], set(), set()) if tree is None else _read(tree)
        return self._files[file]


def _read(tree: ast.Module) -> _File:
    scopes = list(functions_of(tree))
    functions: dict[str, list[Function]] = {}
    for scope in scopes:
        if not isinstance(scope, ast.Module):
            functions.setdefault(scope.name, []).append(scope)
    return _File(_places(tree, functions), functions, scopes, attention_lines(tree), noting_lines(tree))


class _Flows(NamedTuple):
    rates: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


def _places(tree: ast.Module, functions: Mapping[str, list[Function]]) -> dict[int, list[Place]]:
    weights, aliases = Weights(tree), aliases_of(tree)
    at_once, imported = averaged_at_once(tree), without_tensors(tree)
    simulators = simulators_of(tree)
    setting = rate_setters(functions)
    opened, waits, queries = holders_of(tree, {"open"}), holders_of(tree, WAITED_FOR), queries_of(tree)
    turns: dict[tuple[str, Loop, Function | None], bool] = {}

    @cache
    def flows(function: Function | None) -> _Flows:
        if isinstance(function, ast.Lambda):
            return _Flows()
        scope = function or tree
        texts = texts_of(scope, opened)
        saved = saved_in(scope, aliases) | copied_in(scope, texts)
        return _Flows(rates_of(scope, setting), groups_of(scope), saved, texts)

    def known(place: Place) -> Place:
        held = flows(place.function)
        return replace(
            place,
            weights=weights.of(place.function),
            gradients=weights.of(place.function, "gradients"),
            norms=weights.norms(place.function),
            hooked=weights.hooked(place.function),
            turned=weights.turned(place.function),
            rates=held.rates,
            groups=held.groups,
            given_rates=tuple(given_as_rates(place.statement, setting)),
            saved=held.saved,
            texts=held.texts,
            aliases=aliases,
            at_once=at_once,
            imported=imported,
            waited_for=waits,
            simulators=simulators,
            queries=queries,
            turns=turns,
        )

    found = {line: [known(place) for place in places] for line, places in by_line(tree).items()}
    helpers = helpers_of(place for places in found.values() for place in places)
    if not helpers:
        return found
    return {line: [replace(place, helpers=helpers) for place in places] for line, places in found.items()}
