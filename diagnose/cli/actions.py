"""`diagnose actions`: lists the fixes that can be applied to a running job, and explains one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from diagnose.cli._output import Json, answer, put, terminal
from diagnose.core.errors import DiagnoseError


def actions(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Explain this one.")] = None,
    json: Json = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all pages to one file, as markdown.")
    ] = None,
) -> None:
    """Lists the fixes that --tune can try, or explains one."""
    from diagnose.report import _action_pages
    from diagnose.rules import rules as all_rules

    known, rules = _action_pages.built_in_actions(), all_rules()
    if write is not None:
        put(_action_pages.tuning_page(known, rules), str(write))
        return
    if name is not None and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DiagnoseError(f"there is no action {name[:60]!r}.{hint}\nList them: diagnose actions")
    if name is not None:
        data = _action_pages.actions_json({name: known[name]}, rules)
        answer(json, data, _action_pages.action_text(name, known[name], rules, terminal()))
    else:
        data = _action_pages.actions_json(known, rules)
        answer(json, data, _action_pages.actions_text(known, terminal()))
