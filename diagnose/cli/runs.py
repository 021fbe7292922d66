"""`diagnose runs`: lists the recorded runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diagnose.cli._output import Json, RunDir, answer, root_of_runs, terminal
from diagnose.core.errors import DiagnoseError

if TYPE_CHECKING:
    from diagnose.core.profile import Profile

WIDEST = 140  # names of runs and scripts side by side need room


def runs(
    json: Json = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="List the newest N.")] = 20,
    run_dir: RunDir = None,
) -> None:
    """Lists the recorded runs, newest first."""
    from diagnose.report import runs_json, runs_text
    from diagnose.store.runs import list_runs

    root = root_of_runs(run_dir)
    folders = list_runs(root)
    listed = [(folder.name, _profile_or_reason(folder)) for folder in folders[:limit]]
    if json is None and not folders:
        print(f"There are no runs under {root}.\nRecord one: diagnose run train.py", file=sys.stderr)
        return
    answer(json, runs_json(listed), runs_text(listed, len(folders), terminal(WIDEST)))


def _profile_or_reason(folder: Path) -> Profile | str:
    """Returns the run's profile, or why it cannot be read: one bad run does not hide the others."""
    from diagnose.analysis.profile import load_profile

    try:
        return load_profile(folder)
    except DiagnoseError as error:
        return str(error)
