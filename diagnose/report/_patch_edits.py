"""A script's text with other arguments in some of its calls, and with statements added."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import libcst as cst
from libcst import matchers
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from diagnose.report._patch_calls import settable, with_settings
from diagnose.source.calls import aliases


@dataclass(slots=True)
class Edits:
    """What to change in one file: arguments by the line and the name of the call, and statements to add."""

    arguments: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)


def edited(source: str, edits: Edits) -> tuple[str, list[str]]:
    """Returns the changed source, and what could not be changed, by line.

    Raises:
        libcst.ParserSyntaxError: If the source cannot be parsed.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    tree = ast.parse(source)
    known = {callee: {callee, *aliases(tree, callee)} for _, callee in edits.arguments}
    calls = _Calls(edits.arguments, known)
    wrapper.visit(calls)
    failed = []
    single = dict(edits.arguments)
    for (line, callee), arguments in edits.arguments.items():
        count, function = calls.found[line, callee], calls.function.get((line, callee), "")
        settings = ", ".join(f"{name}={value}" for name, value in arguments.items())
        if count > 1:
            failed.append(f"{line}: {count} calls of {callee} stand there; which one needs {settings}?")
        elif not count:
            failed.append(f"{line}: no call of {callee} that takes {', '.join(arguments)} was found there.")
        elif callee == "DataLoader" and calls.called[function] > 1:
            # One may come to be made in another run that this one did not make.
            failed.append(f"{line}: {function}() is called in several places; which one needs {settings}?")
        else:
            continue
        del single[line, callee]
    change = _Change(single, known)
    module = wrapper.visit(change)
    for statement in dict.fromkeys(edits.statements):
        setters = _Setters(statement)
        wrapper.visit(setters)
        failed += [
            f"{line}: {name} is set there; set it to {statement} there." for line, name in setters.found
        ]
        if not setters.found:
            module = _with_statement(module, statement)
    return module.code, failed + change.refused


class _Calls(cst.CSTVisitor):
    """Counts the calls of names that begin or end around given lines, and those of functions they are in.

    Args:
        wanted: Lines and names.
        known: What the file calls each of these names.

    Attributes:
        found: How many there are, by line and name.
        function: How the function that the last of these stands in is called; empty of none.
        called: How often each function of the file is called in it, by how: `make`, `self.make`.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, wanted: Iterable[tuple[int, str]], known: Mapping[str, set[str]]) -> None:
        super().__init__()
        self.found: Counter[tuple[int, str]] = Counter()
        self.function: dict[tuple[int, str], str] = {}
        self.called: Counter[str] = Counter()
        self._wanted = wanted
        self._known = known
        self._inside: list[cst.FunctionDef | cst.ClassDef] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._inside.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._inside.pop()

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._inside.append(node)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._inside.pop()

    def visit_Call(self, node: cst.Call) -> None:
        where = self.get_metadata(PositionProvider, node)
        if name := _full_name(node.func):
            self.called[name] += 1
        for line, callee in self._wanted:
            if _is_at(node, where, line, self._known[callee]):
                self.found[line, callee] += 1
                self.function[line, callee] = self._function()

    def _function(self) -> str:
        *outer, inner = [None, *self._inside]
        if not isinstance(inner, cst.FunctionDef):
            return ""
        return f"self.{inner.name.value}" if isinstance(outer[-1], cst.ClassDef) else inner.name.value


class _Setters(cst.CSTVisitor):
    """Finds where a script sets itself what a statement sets: that would hold, and not what stands above.

    Args:
        statement: The statement: calls, or an attribute that gets a value.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, statement: str) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []
        tree = cst.parse_module(statement)
        calls = matchers.findall(tree, matchers.Expr(value=matchers.Call()))
        values = [cst.ensure_type(each, cst.Expr).value for each in calls]
        self._names = {_name(cst.ensure_type(value, cst.Call).func) for value in values}
        targets = matchers.findall(tree, matchers.AssignTarget())
        self._names |= {_name(cst.ensure_type(each, cst.AssignTarget).target) for each in targets}

    def visit_Call(self, node: cst.Call) -> None:
        self._look(node, node.func)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if isinstance(node.target, cst.Attribute):
            self._look(node, node.target)

    def _look(self, node: cst.CSTNode, named: cst.BaseExpression) -> None:
        if _name(named) in self._names:
            self.found.append((self.get_metadata(PositionProvider, node).start.line, _name(named)))


class _Change(cst.CSTTransformer):
    """Sets keyword arguments of the calls that begin or end around given lines.

    Args:
        wanted: Arguments by line and name.
        known: What the file calls each of these names.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(
        self, wanted: Mapping[tuple[int, str], Mapping[str, str]], known: Mapping[str, set[str]]
    ) -> None:
        super().__init__()
        self.refused: list[str] = []
        self._wanted = wanted
        self._known = known

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        where = self.get_metadata(PositionProvider, original_node)
        for (line, callee), arguments in self._wanted.items():
            if not _is_at(original_node, where, line, self._known[callee]):
                continue
            settings, reason = settable(original_node, callee, arguments)
            if reason:
                self.refused.append(f"{line}: {reason}")
            else:
                updated_node = with_settings(updated_node, settings)
        return updated_node


def _is_at(call: cst.Call, where: CodeRange, line: int, names: set[str]) -> bool:
    return where.start.line <= line <= where.end.line and _name(call.func) in names


def _name(function: cst.BaseExpression) -> str:
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def _full_name(function: cst.BaseExpression) -> str:
    """How a function is called, by its name or as a method of the own object; empty for others."""
    if isinstance(function, cst.Attribute):
        of_self = isinstance(function.value, cst.Name) and function.value.value in ("self", "cls")
        return f"self.{function.attr.value}" if of_self else ""
    return function.value if isinstance(function, cst.Name) else ""


def _with_statement(module: cst.Module, statement: str) -> cst.Module:
    """Adds a line after the last import at the top level."""
    imports = [
        index
        for index, line in enumerate(module.body)
        if isinstance(line, cst.SimpleStatementLine)
        and any(isinstance(small, (cst.Import, cst.ImportFrom)) for small in line.body)
    ]
    added = [cst.parse_statement(statement + "\n")]
    names = {alias.evaluated_name for index in imports for alias in _aliases(module.body[index])}
    if statement.startswith("torch.") and not any(name.split(".")[0] == "torch" for name in names):
        added.insert(0, cst.parse_statement("import torch\n"))
    at = imports[-1] + 1 if imports else 0
    return module.with_changes(body=[*module.body[:at], *added, *module.body[at:]])


def _aliases(line: cst.BaseStatement) -> list[cst.ImportAlias]:
    small = line.body if isinstance(line, cst.SimpleStatementLine) else ()
    return [
        alias
        for each in small
        if isinstance(each, cst.Import)
        for alias in each.names
        if alias.evaluated_alias is None
    ]
