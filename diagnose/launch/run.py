"""Runs a script under supervision: folder, process, report."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from diagnose.core.errors import DiagnoseError
from diagnose.launch.command import Target, environment, why_blind
from diagnose.launch.ending import conclude, ctrl_c_interrupts, get_ready, say, say_notes
from diagnose.launch.exporting import check_exports, start_exporting
from diagnose.launch.opened import Opened, open_beside
from diagnose.launch.rank_choice import ALL
from diagnose.launch.record import Record, open_record
from diagnose.launch.settings import Settings
from diagnose.launch.supervisor import Fate, supervise
from diagnose.launch.torchrun import RanksAtWork, place_in_torchrun, place_of_node, torchrun_arguments
from diagnose.store.runs import check_name
from diagnose.tuner.kept import read as read_kept

Started = TypeVar("Started")


def run(target: Target, settings: Settings, torchrun: Mapping[str, Any]) -> Fate:
    """Runs the script, records it, prints and writes the report.

    Args:
        target: The script.
        settings: The user's settings.
        torchrun: Options for `torch.distributed.run`, by name; `None` where one was not given. Without
            any the script is a plain process.

    Returns:
        How the script ended, whatever became of the report.

    Raises:
        DiagnoseError: If the script or the folder for a report is not there, or the run's name is none.
            Nothing was started then.
    """
    _check(target, settings)
    launcher = torchrun_arguments({"nproc_per_node": settings.nproc_per_node, **torchrun})
    name = settings.name or target.name
    if launcher:
        place = place_of_node(torchrun, os.environ, name, is_given=settings.name is not None)
    else:
        place = place_in_torchrun(os.environ, name)
    record = open_record(target, settings, place)
    for doubt in (why_blind(), target.namesake()):
        if doubt:
            record.note(doubt)
    # What goes into a file or a pipe is the script's first; only a person is told right away.
    told = sys.stderr is not None and sys.stderr.isatty()
    opened = _beside(record, "the dashboard", open_beside) if settings.dashboard else None
    exporting = None
    if settings.export:
        start = partial(start_exporting, exports=settings.export)
        exporting = _beside(record, "the process that exports", start)
    if told and record.is_first:
        _tell_start(record, settings, opened)
    ranks = RanksAtWork(record.folder) if place is not None and record.folder is not None else None
    command, variables = target.command(launcher), environment(os.environ, settings, record.folder)
    fate = supervise(command, variables, beside=lambda: get_ready(record, settings))
    if ranks is not None:
        # After a failure torchrun waits for this rank to end before it ends the others.
        if record.is_first and fate.exit_code == 0:
            ranks.wait_for_others()
        ranks.leave()
    if not told and record.is_first:
        say_notes(record)
        _tell_name(record, settings)
    conclude(record, settings, fate, launcher=launcher[2:])
    if exporting is not None:
        with contextlib.suppress(KeyboardInterrupt), ctrl_c_interrupts():
            for words in exporting.finish(quiet=settings.quiet):
                say(f"diagnose: {words}")
    if opened is not None:
        with ctrl_c_interrupts():
            opened.close()
        if not settings.quiet:
            say(f"diagnose: the dashboard is closed; open it again: {opened.command}")
    return fate


def _check(target: Target, settings: Settings) -> None:
    """Refuses what cannot be done, before anything is started."""
    target.check()
    if settings.name is not None:
        check_name(settings.name)
    _check_destination("--json", settings.json)
    _check_destination("--html", settings.html)
    if settings.apply is not None:
        read_kept(settings.apply)
    check_exports(settings.export)
    if settings.tunes and settings.ranks != ALL:
        raise DiagnoseError(
            f"diagnose: --ranks {settings.ranks} leaves ranks out, and they decide on a fix together.\n"
            "Leave out --ranks, or --tune, --dry-run and --apply."
        )


def _beside(record: Record, what: str, start: Callable[[Path], Started]) -> Started | None:
    """Starts what was asked for beside the run; a run without it is better than none."""
    if record.folder is None or not record.is_first:
        return None
    try:
        return start(record.folder)
    except OSError as error:
        record.note(f"{what} could not be started: {error}.")
        return None


def _tell_start(record: Record, settings: Settings, opened: Opened | None) -> None:
    say_notes(record)
    if record.folder is None or settings.quiet:
        return
    where = os.path.relpath(record.folder.parent)
    _tell_name(record, settings)
    say(f"diagnose: run {record.folder.name}  recording to {where}; Ctrl-C stops the script as usual")
    if opened is not None:
        say(f"diagnose: dashboard at {opened.address}")


def _tell_name(record: Record, settings: Settings) -> None:
    """Says that the run is called otherwise than was asked for: that name is still the earlier run's."""
    name = record.folder.name if record.folder is not None else None
    if settings.name is not None and name not in (None, settings.name) and not settings.quiet:
        say(f"diagnose: there is a run {settings.name} already; this one is {name}")


def _check_destination(option: str, path: Path | None) -> None:
    """Finds a wrong path now, not after hours of training."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise DiagnoseError(f"diagnose: cannot write {option} {path}: there is no folder {folder}.")
    if path.is_dir():
        raise DiagnoseError(f"diagnose: cannot write {option} {path}: it is a folder.")
    if str(path) == "-":
        raise DiagnoseError(f"diagnose: {option} needs a file: stdout is the script's.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise DiagnoseError(f"diagnose: cannot write {option} {path}: no permission.")
