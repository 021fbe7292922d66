"""`diagnose export`: takes a run's figures to other tools."""

from __future__ import annotations

from typing import Annotated

import typer

from diagnose.cli._output import Run, RunDir, root_of_runs


def export(
    to: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[=TARGET]",
            help="csv, mlflow, otel, perfetto, prometheus, tensorboard or wandb; several may be given.",
        ),
    ],
    run: Run = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on while the run does, a few times a minute.")
    ] = False,
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
    run_dir: RunDir = None,
) -> None:
    """Takes a run's figures to other tools.

    A trace to look at, metrics to scrape, scalars to track. Nothing is sent anywhere unless the
    target says so.
    """
    from diagnose.export._live import export_once, follow_run
    from diagnose.export.base import Destination
    from diagnose.store.runs import resolve_run

    destinations = [Destination.parse(text) for text in to]
    folder = resolve_run(run, root_of_runs(run_dir))
    if beside:
        follow_run(folder, destinations, till_stdin_closes=True)
    elif follow:
        for destination in destinations:
            destination.check()
        if not follow_run(folder, destinations, till_stdin_closes=False):
            raise typer.Exit(1)
    else:
        export_once(folder, destinations)
