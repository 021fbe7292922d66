"""`diagnose report`: shows what a run recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diagnose.cli._output import STDOUT, Json, Run, RunDir, as_json, put, root_of_runs, show, terminal
from diagnose.core.errors import DiagnoseError

if TYPE_CHECKING:
    from diagnose.core.profile import Profile

WIDEST = 120  # a wider table is not easier to read


def report(
    run: Run = None,
    json: Json = None,
    html: Annotated[
        str | None, typer.Option(metavar="PATH|-", help="Write one HTML file, or to stdout for -.")
    ] = None,
    md: Annotated[
        str | None, typer.Option(metavar="PATH|-", help="Write markdown to a file, or to stdout for -.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Draw --html's charts with plotly.js: zoom, hover; 5 MB.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="STEP|tuning",
            help="Look at the steps from this one on; tuning: at those with all kept fixes in force.",
        ),
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Says what slowed a recorded run down, and where its time went."""
    if [json, html, md].count(STDOUT) > 1:
        raise DiagnoseError("diagnose report: only one of --json, --html and --md can go to stdout.")
    if interactive and html is None:
        raise DiagnoseError("diagnose report: --interactive is about --html; name the file: --html PATH.")
    from diagnose.report import to_html, to_json, to_markdown, to_text
    from diagnose.rules import diagnosed
    from diagnose.store.runs import resolve_run

    profile = diagnosed(_profile(resolve_run(run, root_of_runs(run_dir)), since))
    if json is not None:
        put(as_json(to_json(profile)), json)
    if html is not None:
        put(to_html(profile, interactive=interactive), html)
    if md is not None:
        put(to_markdown(profile), md)
    if json is html is md is None:
        show(to_text(profile, terminal(WIDEST)))


def _profile(run: Path, since: str | None) -> Profile:
    """Analyses a run, or as if it had begun later: what tuning did is then no part of it."""
    from diagnose.analysis.profile import load_profile

    if since is None:
        return load_profile(run)
    if since.isdecimal() and int(since) > 0:
        first = int(since) - 1
    elif since == "tuning":
        tuning = load_profile(run).tuning
        if tuning is None or not tuning.kept or tuning.tuned is None:
            raise DiagnoseError(f"diagnose report: {run.name} has no steps with kept fixes in force.")
        first = tuning.tuned[0]
    else:
        raise DiagnoseError(f"diagnose report: --since takes a step from 1 on, or tuning, not {since!r}.")
    profile = load_profile(run, first_step=first)
    note = f"This is about the steps from {first + 1:,} on alone."
    return replace(profile, tuning=None, notes=(note, *profile.notes))
