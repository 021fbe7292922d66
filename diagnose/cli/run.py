"""`diagnose run`: runs a script and says where its time went."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

# What follows the script is the script's. Unknown options before it stay errors: with them ignored,
# `run --stpes 5 train.py` would run a script called --stpes.
OPTIONS = {"context_settings": {"allow_extra_args": True, "allow_interspersed_args": False}}

TORCHRUNS = typer.Option(help="Passed to torchrun.")


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT|MODULE [ARGS]...", help="The script, and what it is given.")
    ],
    is_module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the run. [default: time and script]")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder that holds the runs. [default: .diagnose/runs]")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the report as HTML.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measure N steps, then let it train on.")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End the script cleanly after N steps.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Leave the first N steps out of every figure.")
    ] = None,
    quiet: Annotated[
        bool | None, typer.Option("--quiet/--no-quiet", help="Print no start line and no report.")
    ] = None,
    tune: Annotated[
        bool | None,
        typer.Option("--tune/--no-tune", help="Try fixes on the running job; keep what helps."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Also try fixes that change the numbers: precision, training."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ACTION", help="Try only this fix.")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="ACTION", help="Do not try this fix.")] = None,
    dry_run: Annotated[
        bool | None,
        typer.Option(
            "--dry-run/--no-dry-run", help="Name the fixes that --tune would try; change nothing."
        ),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Put the fixes of a tuned.toml in force, without trials."),
    ] = None,
    dashboard: Annotated[
        bool | None,
        typer.Option(
            "--dashboard/--no-dashboard",
            help="Show the run in a browser while it trains; prints the address.",
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=TARGET]",
            help="Take figures to another tool meanwhile; see diagnose export.",
        ),
    ] = None,
    deep_window: Annotated[
        str | None,
        typer.Option(
            metavar="STEP[:COUNT]|auto",
            help="Record COUNT steps, 3 unless given, operation by operation; auto: if a rule is unsure.",
        ),
    ] = None,
    nproc_per_node: Annotated[
        str | None, typer.Option(metavar="N", help="Start N ranks through torchrun.")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="RANKS", help="Ranks that record: all, first, sample, or 0,1,8-15."),
    ] = None,
    nnodes: Annotated[str | None, TORCHRUNS] = None,
    node_rank: Annotated[int | None, TORCHRUNS] = None,
    master_addr: Annotated[str | None, TORCHRUNS] = None,
    master_port: Annotated[int | None, TORCHRUNS] = None,
    local_addr: Annotated[str | None, TORCHRUNS] = None,
    standalone: Annotated[bool | None, typer.Option("--standalone", help="Passed to torchrun.")] = None,
    rdzv_backend: Annotated[str | None, TORCHRUNS] = None,
    rdzv_endpoint: Annotated[str | None, TORCHRUNS] = None,
    rdzv_id: Annotated[str | None, TORCHRUNS] = None,
    rdzv_conf: Annotated[str | None, TORCHRUNS] = None,
    max_restarts: Annotated[int | None, TORCHRUNS] = None,
    monitor_interval: Annotated[float | None, TORCHRUNS] = None,
    start_method: Annotated[str | None, TORCHRUNS] = None,
    role: Annotated[str | None, TORCHRUNS] = None,
    log_dir: Annotated[str | None, TORCHRUNS] = None,
    redirects: Annotated[str | None, TORCHRUNS] = None,
    tee: Annotated[str | None, TORCHRUNS] = None,
    local_ranks_filter: Annotated[str | None, TORCHRUNS] = None,
) -> None:
    """Runs a PyTorch script and says where its time went.

    The script stays as it is. Everything after SCRIPT is the script's own, also options that have the
    name of one of ours.
    """
    from diagnose.launch.command import Target
    from diagnose.launch.run import run as run_script
    from diagnose.launch.settings import KEYS, resolve
    from diagnose.launch.supervisor import end_as

    # In the context of typers before 0.28 a path is still text.
    options = context.params | {"run_dir": run_dir, "json": json, "html": html, "apply": apply}
    script, is_module = options.pop("script"), options.pop("is_module")
    target = Target(script=script, is_module=is_module, arguments=tuple(context.args))
    settings = resolve({key: options.pop(key) for key in KEYS}, os.environ, Path.cwd())
    end_as(run_script(target, settings, torchrun=options))
