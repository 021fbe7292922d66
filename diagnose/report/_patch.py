"""The fixes that tuning kept, written into the user's script: a unified diff."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import libcst as cst
from libcst import matchers
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from diagnose.core.profile import Profile
from diagnose.core.trial import Trial
from diagnose.report._tuning_words import named
from diagnose.source.calls import BY_PLACE, aliases

STATEMENT = "statement"
ADVICE = "advice"
NOTE = "note"

REFUSED_BESIDE = {"fused": "foreach"}
"""By argument, another that torch refuses beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What to change in the script.

    Attributes:
        diff: A unified diff, for `patch -p1` or `git apply`.
        folder: Where to apply it: the folder that was asked for, or one above it that holds all files.
        left_out: What could not be written as a change of the script, one sentence each.
    """

    diff: str
    folder: Path
    left_out: tuple[str, ...] = ()


@dataclass(slots=True)
class _Edits:
    """What to change in one file: arguments by the line and the name of the call, and statements to add."""

    arguments: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)


def patch_of(
    profile: Profile,
    folder: Path,
    ran: Mapping[str, str] = MappingProxyType({}),
    started_in: Path | None = None,
) -> Patch:
    """Writes the settings that tuning kept into the files that the run's objects were made in.

    Args:
        profile: The run.
        folder: Where the diff is to be applied, if all files lie below it.
        ran: Texts of files as they ran. One that has been edited since is left alone: its lines are others.
        started_in: The folder from which the run named its script; `None` for `folder`.

    Raises:
        OSError: If a file of the script can no longer be read.
    """
    left_out: list[str] = []
    edits: defaultdict[Path, _Edits] = defaultdict(_Edits)
    for trial in profile.tuning.kept if profile.tuning else ():
        if not trial.settings:
            left_out.append(f"{named(trial)} has no setting in the script; use diagnose run --apply.")
        for key, value in trial.settings.items():
            if key == NOTE:
                left_out.append(f"{named(trial)}: {value}.")
                continue
            if key == ADVICE:
                left_out.append(f"{named(trial)} has to be written by hand: {value}")
                continue
            if key == STATEMENT:
                path = _main_file(profile, started_in or folder)
                if path is None:
                    left_out.append(f"{value}: the script's file is not known.")
                else:
                    edits[path].statements.append(value)
                continue
            callee, _, argument = key.partition(".")
            sites = _sites(profile, callee)
            if len(sites) > 1:
                places = ", ".join(
                    f"{_relative(Path(file), folder)}:{line}" for file, line in sites if file
                )
                left_out.append(f"{key} = {value}: which {callee} needs it is not known ({places}).")
            elif not sites or not sites[0][0]:
                left_out.append(f"{key} = {value}: where {callee} is called is not known.")
            else:
                ((file, line),) = sites
                if callee == "DataLoader" and (doubt := _of_others(profile)):
                    left_out.append(f"{key} = {value}: {_relative(Path(file), folder)}:{line} {doubt}.")
                    continue
                if argument == "prefetch_factor" and not _has_workers(profile, trial):
                    left_out.append(f"{key} = {value}: torch refuses it without workers.")
                    continue
                edits[Path(file)].arguments.setdefault((line, callee), {})[argument] = value
    diffs = []
    # No tool follows names with `..`.
    top = Path(os.path.commonpath([folder.absolute(), *(path.absolute().parent for path in edits)]))
    for path, wanted in edits.items():
        try:
            before = path.read_bytes().decode()  # a diff has the file's own line ends
            if ran.get(str(path), plain := _with_plain_ends(before)) != plain:
                left_out.append(f"{_relative(path, folder)}: it was edited since; tune it again.")
                continue
            after, failed = _edited(before, wanted)
        except (UnicodeDecodeError, cst.ParserSyntaxError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it cannot be parsed"
            left_out.append(f"{_relative(path, folder)}: {why}; write the settings by hand.")
            continue
        left_out += [f"{_relative(path, folder)}:{reason}" for reason in failed]
        diffs.append(_diff(before, after, _relative(path, top)))
    return Patch(diff="".join(diffs), folder=top, left_out=tuple(left_out))


def _has_workers(profile: Profile, but: Trial) -> bool:
    """Whether the patched script's loaders have workers, of its own or of another kept fix."""
    kept = profile.tuning.kept if profile.tuning else ()
    given = any("DataLoader.num_workers" in trial.settings for trial in kept if trial is not but)
    return given or any(loader.num_workers for loader in profile.program.loaders)


def _of_others(profile: Profile) -> str:
    """Says what forbids to change the one line that makes the loaders: another loader made there, such as
    that of an evaluation, would be changed, too. Empty if there is none."""
    others = [loader.num_others for loader in profile.program.loaders]
    if None in others:
        return "may make other loaders, too: nobody has counted them"
    return "makes other loaders, too, which were not tried" if any(others) else ""


def _main_file(profile: Profile, started_in: Path) -> Path | None:
    """The file to add a statement to: the script, or, of a module, where its objects are made."""
    script = started_in / profile.run.script
    if script.is_file():
        return script.absolute()
    program = profile.program
    files = [each.file for each in program.optimizers] + [each.file for each in program.loaders]
    return next((Path(file) for file in files if file), None)


def _sites(profile: Profile, callee: str) -> list[tuple[str, int]]:
    """Where such objects are made; an empty file is not known."""
    program = profile.program
    if callee == "DataLoader":
        found = [(loader.file, loader.line) for loader in program.loaders]
    elif callee == "DistributedDataParallel":
        found = [(ddp.file, ddp.line) for ddp in program.ddp]
    else:
        found = [(each.file, each.line) for each in program.optimizers if each.kind == callee]
    return list(dict.fromkeys(found))


def _edited(source: str, edits: _Edits) -> tuple[str, list[str]]:
    """Returns the changed source, and what could not be changed, by line."""
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
            reason = _cannot_take(original_node, callee, arguments)
            if not reason and "prefetch_factor" in arguments and "num_workers" not in arguments:
                arguments, reason = _with_workers_only(original_node, arguments)
            if reason:
                self.refused.append(f"{line}: {reason}")
                continue
            for name, value in arguments.items():
                updated_node = _without(updated_node, REFUSED_BESIDE.get(name))
                updated_node = _with_argument(updated_node, name, value)
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


def _cannot_take(call: cst.Call, callee: str, arguments: Mapping[str, str]) -> str:
    """Says why arguments cannot be set by keyword; empty if they can."""
    stars = {argument.star for argument in call.args}
    if "**" in stars:
        return f"the call of {callee} takes ** of a mapping; set {', '.join(arguments)} in there."
    if "*" in stars and callee in BY_PLACE:
        return f"the call of {callee} takes * of a list; set {', '.join(arguments)} by hand."
    by_position = sum(argument.keyword is None for argument in call.args)
    taken = set(BY_PLACE.get(callee, ())[:by_position]) & set(arguments)
    if taken:
        return f"{', '.join(sorted(taken))} is given by position; write it as a keyword first."
    return ""


def _with_workers_only(call: cst.Call, arguments: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Returns the arguments, with a longer queue only where there are workers, as torch demands; or why
    that cannot be written. What another run gives the call need not be what this one has."""
    place = BY_PLACE["DataLoader"].index("num_workers")
    given = [each for each in call.args if each.keyword is not None and each.keyword.value == "num_workers"]
    given += [each for each in call.args[place : place + 1] if each.keyword is None]
    factor = arguments["prefetch_factor"]
    if not given or matchers.findall(given[0].value, matchers.Call() | matchers.NamedExpr()):
        return arguments, f"prefetch_factor={factor} needs num_workers, which is not simply a number there."
    workers = given[0].value
    if isinstance(workers, cst.Integer):
        return arguments, ""
    number = cst.Module([]).code_for_node(workers)
    if not isinstance(workers, cst.Name | cst.Attribute):
        number = f"({number})"
    return {**arguments, "prefetch_factor": f"{factor} if {number} else None"}, ""


def _without(call: cst.Call, name: str | None) -> cst.Call:
    """Takes a keyword argument out of a call, if it has it."""
    args = [each for each in call.args if each.keyword is None or each.keyword.value != name]
    if args:
        last = call.args[-1]
        args[-1] = args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return call.with_changes(args=args)


def _with_argument(call: cst.Call, name: str, value: str) -> cst.Call:
    expression = cst.parse_expression(value)
    for index, argument in enumerate(call.args):
        if argument.keyword is not None and argument.keyword.value == name:
            changed = argument.with_changes(value=expression)
            return call.with_changes(args=[*call.args[:index], changed, *call.args[index + 1 :]])
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    added = cst.Arg(keyword=cst.Name(name), value=expression, equal=equal)
    if not call.args:
        return call.with_changes(args=[added])
    last, gap = call.args[-1], _between(call)
    if isinstance(last.comma, cst.Comma):  # a trailing comma, as formatters write it: one argument per line
        gap, end = _commented(gap, last.comma.whitespace_after)
        added = added.with_changes(comma=last.comma.with_changes(whitespace_after=end))
    else:
        gap, end = _commented(gap, last.whitespace_after_arg)
        added = added.with_changes(whitespace_after_arg=end)
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    separated = last.with_changes(comma=cst.Comma(whitespace_after=gap))
    return call.with_changes(args=[*call.args[:-1], separated, added])


Space = cst.BaseParenthesizableWhitespace


def _commented(space: Space, end: Space) -> tuple[Space, Space]:
    """Gives one space the comment at the line's end that stands in another; returns both."""
    if not isinstance(space, cst.ParenthesizedWhitespace) or not isinstance(
        end, cst.ParenthesizedWhitespace
    ):
        return space, end
    bare = cst.TrailingWhitespace(newline=end.first_line.newline)
    return space.with_changes(first_line=end.first_line), end.with_changes(first_line=bare)


def _between(call: cst.Call) -> cst.BaseParenthesizableWhitespace:
    """The space between the call's arguments, as its author writes it; without the comments there."""
    commas = [argument.comma for argument in call.args[:-1] if isinstance(argument.comma, cst.Comma)]
    space = commas[-1].whitespace_after if commas else call.whitespace_before_args
    if isinstance(space, cst.ParenthesizedWhitespace):
        bare = cst.TrailingWhitespace(newline=space.first_line.newline)
        return space.with_changes(first_line=bare, empty_lines=[])
    return space if commas else cst.SimpleWhitespace(" ")


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


def _relative(path: Path, folder: Path) -> str:
    try:
        return os.path.relpath(path, folder)
    except ValueError:  # another drive
        return str(path)


def _with_plain_ends(text: str) -> str:
    """As Python reads a text."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> list[str]:
    """As git sees them: a form feed ends none."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
