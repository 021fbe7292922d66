"""`diagnose dashboard`: serves the runs to a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from diagnose.cli._output import RunDir, root_of_runs

PORT = 8050


def dashboard(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Open this run. [default: the list of runs]")
    ] = None,
    run_dir: RunDir = None,
    host: Annotated[
        str, typer.Option(help="Address to serve on. Any but this machine's own needs the printed token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"0 takes a free one. [default: {PORT}, or the next free]"),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    socket_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Shows the runs in a browser, also those that train now.

    Ctrl-C ends it.
    """
    from diagnose.store.runs import resolve_run

    root, name = root_of_runs(run_dir), None
    if run is not None:
        folder = resolve_run(run, root).absolute()
        root, name = folder.parent, folder.name
    # Only now: a wrong name is told before a second's imports.
    from diagnose.dashboards._serving import serve, serve_child

    if socket_fd is not None:
        serve_child(root, socket_fd)
        return
    serve(root, name, host, PORT if port is None else port, any_port=port is None, opens=not no_open)
