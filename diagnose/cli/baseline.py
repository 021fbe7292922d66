"""`diagnose baseline`: what `diagnose gate --baseline` compares with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from diagnose.cli._gate import (
    BEFORE_SCRIPT,
    Budget,
    KeptIn,
    Steps,
    Warmup,
    Words,
    asked_of,
    folder_for_runs,
    own_exit_codes,
    training_command,
)
from diagnose.cli._output import Json, answer, as_json, put, show
from diagnose.core.errors import DiagnoseError

Place = Annotated[
    Path | None,
    typer.Option("--place", metavar="PATH", help="File or folder. [default: .diagnose/baselines]"),
]


baseline = typer.Typer(
    help="Records and shows what diagnose gate --baseline compares with.", no_args_is_help=True
)


@baseline.command(context_settings=BEFORE_SCRIPT)
def update(
    words: Words = None,
    place: Place = None,
    branch: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Record this branch. [default: the main branch alone]"),
    ] = None,
    steps: Steps = None,
    warmup: Warmup = None,
    budget: Budget = None,
    run_dir: KeptIn = None,
) -> None:
    """Measures the training command and adds the job to the baseline of this kind of machine.

    Nothing is recorded where the command fails, or off the main branch.
    """
    from diagnose.gate.baseline import FOLDER
    from diagnose.gate.update import current_branch, record_job

    with own_exit_codes("baseline", "nothing was recorded"):
        command = training_command(list(words or ()), verb="baseline update")
        asked = asked_of("samples_per_s", "3%", steps, warmup, budget)
        recorded = branch or current_branch(Path.cwd())
        folder = folder_for_runs(run_dir, "baseline")
        path, jobs = record_job(
            command,
            asked,
            place or FOLDER,
            folder,
            branch=recorded,
            progress=lambda text: print(f"baseline: {text}", file=sys.stderr, flush=True),
        )
    show(f"{path} holds {jobs} job{'s' if jobs != 1 else ''} now; commit it.\n")


@baseline.command("show")
def show_one(
    name: Annotated[
        str | None, typer.Argument(metavar="KEY|PATH", help="Which baseline. [default: the only one]")
    ] = None,
    place: Place = None,
    json: Json = None,
) -> None:
    """Shows the jobs of one baseline, and what drop it would find."""
    from diagnose.gate.as_baseline import baseline_json, baseline_text
    from diagnose.gate.baseline import FOLDER, load

    path = _path(name, place or FOLDER)
    found = load(path)
    answer(json, baseline_json(path, found), baseline_text(path, found))


@baseline.command("list")
def list_all(place: Place = None, json: Json = None) -> None:
    """Lists the baselines: one for each kind of machine and work."""
    from diagnose.gate.as_baseline import baseline_json, baselines_text
    from diagnose.gate.baseline import FOLDER, load

    folder = place or FOLDER
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else [folder] if folder.is_file() else []
    found, damaged = [], {}
    for path in paths:
        try:
            found.append((path, load(path)))
        except DiagnoseError as error:  # one bad baseline does not hide the others
            damaged[path] = str(error)
    if json is not None:
        told = [baseline_json(*each) for each in found]
        told += [{"path": str(path), "error": error} for path, error in damaged.items()]
        put(as_json({"schema": 1, "baselines": told}), json)
        return
    if damaged:
        print("\n".join(damaged.values()), file=sys.stderr)
    if not found and not damaged:
        print(f"There are no baselines in {folder}.\nRecord one: diagnose baseline update -- train.py")
    elif found:
        show(baselines_text(found))


def _path(name: str | None, place: Path) -> Path:
    if name is None:
        paths = sorted(place.glob("*.json")) if place.is_dir() else [place]
        if len(paths) != 1 or not paths[0].is_file():
            raise DiagnoseError(
                f"baseline: {place} holds {len([path for path in paths if path.is_file()])} baselines; "
                "say which. List them: diagnose baseline list"
            )
        return paths[0]
    for path in (Path(name), place / f"{name}.json"):
        if path.is_file():
            return path
    raise DiagnoseError(f"baseline: there is no baseline {name!r}.\nList them: diagnose baseline list")
