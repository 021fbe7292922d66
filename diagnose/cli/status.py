"""`diagnose status`: how a run stands while it trains."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from diagnose.cli._output import Json, Run, RunDir, answer, root_of_runs, show, terminal


def status(
    run: Run = None,
    json: Json = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Print again so often, until the run has ended."),
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Says how a run stands, also while it trains.

    Steps, throughput, and what slows it down so far.
    """
    from diagnose.store.runs import resolve_run

    folder = resolve_run(run, root_of_runs(run_dir))
    goes_on = _print(folder, json)
    try:
        while watch is not None and goes_on:
            time.sleep(watch)
            if json is None:
                show("\n")
            goes_on = _print(folder, json)
    except KeyboardInterrupt:
        pass  # how one stops watching


def _print(folder: Path, json: str | None) -> bool:
    """Prints once; says whether the run may go on."""
    from diagnose.analysis.profile import load_profile
    from diagnose.core.liveness import State
    from diagnose.report import status_json, status_text
    from diagnose.rules import diagnosed
    from diagnose.store.liveness import liveness

    live = liveness(folder)
    profile = diagnosed(load_profile(folder))
    answer(json, status_json(profile, live), status_text(profile, live, terminal()))
    sys.stdout.flush()
    return live.state in (State.RUNNING, State.CANNOT_TELL)
