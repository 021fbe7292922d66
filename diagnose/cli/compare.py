"""`diagnose compare`: says whether one run was faster than another."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from diagnose.cli._output import Json, RunDir, answer, root_of_runs, terminal


def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="Name or path of the run before.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Name or path of the run after.")],
    json: Json = None,
    run_dir: RunDir = None,
) -> None:
    """Compares two runs phase by phase: faster, slower, cannot tell.

    Sets the predicted gain of a fix beside the measured one.
    """
    from diagnose.analysis.predictions import prediction
    from diagnose.analysis.profile import compared, load_profile
    from diagnose.report import FaultChanges, comparison_json, comparison_text
    from diagnose.rules import diagnosed
    from diagnose.store.gains import note_prediction
    from diagnose.store.runs import resolve_run

    root = root_of_runs(run_dir)
    one, other = resolve_run(before, root), resolve_run(after, root)
    profiles = (diagnosed(load_profile(one)), diagnosed(load_profile(other)))
    runs = (profiles[0].run, profiles[1].run)
    comparison = compared((one, other), profiles)
    predicted = prediction(*profiles, comparison)
    faults = FaultChanges(before=profiles[0], after=profiles[1], prediction=predicted)
    text = comparison_text(comparison, runs, terminal(), faults)
    answer(json, comparison_json(comparison, runs, faults), text)
    if predicted is not None:
        try:
            note_prediction(predicted)
        except OSError as error:
            print(f"diagnose: the prediction could not be noted: {error}", file=sys.stderr)
