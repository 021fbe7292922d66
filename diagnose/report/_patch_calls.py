"""Keyword arguments set in one call of a script, whose text stays as its author wrote it."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst
from libcst import matchers

from diagnose.source.calls import BY_PLACE

REFUSED_BESIDE = {"fused": "foreach"}
"""By argument, another that torch refuses beside it."""


def settable(call: cst.Call, callee: str, arguments: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Returns what to set in a call, which is not always what was asked for; or why it cannot be set.

    Args:
        call: The call as the script has it.
        callee: What is called, by its own name.
        arguments: What is asked for.
    """
    reason = _cannot_take(call, callee, arguments)
    if not reason and "prefetch_factor" in arguments and "num_workers" not in arguments:
        return _with_workers_only(call, arguments)
    return arguments, reason


def with_settings(call: cst.Call, arguments: Mapping[str, str]) -> cst.Call:
    """Returns a call with these keyword arguments; those it has already are changed where they stand."""
    for name, value in arguments.items():
        call = _with_argument(_without(call, REFUSED_BESIDE.get(name)), name, value)
    return call


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
