"""`diagnose doctor`: what can be measured on this machine, and what its devices reach."""

from __future__ import annotations

from typing import Annotated

import typer

from diagnose.cli._output import Json, RunDir, answer, root_of_runs, terminal
from diagnose.core.errors import DiagnoseError


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure what each device reaches, and remember it: about a minute."
        ),
    ] = False,
    json: Json = None,
    run_dir: RunDir = None,
) -> None:
    """Says what this machine can measure, what it cannot and why.

    Also what its devices reach, once that has been measured.
    """
    from diagnose.launch.doctor import examine
    from diagnose.report import doctor_json, doctor_text
    from diagnose.store.machine import keep_rates, kept_rates

    checks = examine(root_of_runs(run_dir))
    if measure:
        try:
            from diagnose.launch.machine_rates import devices
            from diagnose.launch.machine_rates import measure as measured
        except ImportError as error:
            raise DiagnoseError(f"doctor: nothing can be measured without torch: {error}.") from error
        for device in devices():
            try:
                keep_rates(measured(device))
            except OSError as error:
                raise DiagnoseError(
                    f"doctor: the rates cannot be kept: {error}.\nSet DIAGNOSE_STATE to a folder."
                ) from error
    rates = kept_rates()
    answer(json, doctor_json(checks, rates), doctor_text(checks, rates, terminal()))
