"""Where one run is recorded, and what `run.json` there says of it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from diagnose.launch import run_folder
from diagnose.launch.command import Target
from diagnose.launch.process_clock import own_age_s
from diagnose.launch.settings import Settings
from diagnose.launch.supervisor import Fate
from diagnose.launch.torchrun import Place, is_restarted, launched_unix
from diagnose.store.runs import read_manifest


@dataclass(slots=True, kw_only=True)
class Record:
    """The run folder of this process, and the facts about the run.

    Attributes:
        folder: The run's folder, absolute; `None` where none could be written: the script runs unrecorded.
        facts: What `run.json` holds.
        is_first: Whether this process writes `run.json` and speaks: the only one, or rank 0.
    """

    folder: Path | None
    facts: dict[str, Any]
    is_first: bool = True

    def note(self, text: str) -> None:
        """Adds what the reader of the report must know."""
        self.facts["notes"].append(text)

    def end(self, fate: Fate) -> None:
        """Writes down how the script ended.

        Raises:
            OSError: If `run.json` could not be rewritten.
        """
        self.facts.update(ended_unix=time.time(), exit_code=fate.exit_code, signal=fate.signal)
        self.write()

    def write(self) -> None:
        """Writes `run.json`, on the one process that does."""
        if self.folder is not None and self.is_first:
            run_folder.write_manifest(self.folder, self.facts)


def open_record(target: Target, settings: Settings, place: Place | None) -> Record:
    """Makes the run's folder: where it is wanted, else in a temporary place, else nowhere.

    Args:
        target: The script.
        settings: The user's settings; a missing or unwritable `run_dir` is no reason not to run.
        place: This process's place among ranks that share a folder.
    """
    now = time.time()
    record = Record(folder=None, facts=_facts(target, settings, now), is_first=not place or place.rank == 0)
    wanted, name = settings.run_dir, place.folder if place else ""
    if place and place.path:
        environ = os.environ
        given = run_folder.given_folder(
            place.path, launched=launched_unix(environ), is_restarted=is_restarted(environ)
        )
        wanted, name = given.parent, given.name
        if place.rank is None:
            record.is_first = not read_manifest(given)
    if place and place.late_s is not None and not place.path:
        knows = None if place.rank is None else record.is_first
        name, record.is_first = run_folder.common_folder(wanted, name, place.late_s, is_first=knows)
    if not place:
        name = settings.name or run_folder.folder_name(time.localtime(now), target.name)
    try:
        _open(record, wanted, name, shared=place is not None)
    except OSError as error:
        problem = f"{wanted / name} could not be written ({error.strerror or error})"
    else:
        return record
    try:
        _open(record, run_folder.temporary_root(), name, shared=place is not None)
        record.note(f"{problem}; this run is kept in {record.folder}.")
        record.write()
    except OSError as error:
        record.folder = None
        record.note(f"{problem}, nor could {error.filename} ({error.strerror}); nothing is recorded.")
    return record


def _open(record: Record, root: Path, name: str, *, shared: bool) -> None:
    record.folder = run_folder.create(root, name, shared=shared)
    record.facts.update(id=record.folder.name, startup_s=round(own_age_s(), 3))
    try:
        record.write()  # also the test whether files, not just folders, can be made there
    except OSError:
        with contextlib.suppress(OSError):
            record.folder.rmdir()
        raise


def _facts(target: Target, settings: Settings, now: float) -> dict[str, Any]:
    return {
        "id": "",
        "name": settings.name or "",
        "script": target.script,
        "module": target.is_module,
        "argv": list(target.arguments),
        "cwd": os.getcwd(),
        "python": sys.executable,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "started": datetime.fromtimestamp(now).astimezone().isoformat(timespec="seconds"),
        "started_unix": now,
        "ended_unix": None,
        "exit_code": None,
        "signal": None,
        "startup_s": None,
        "warmup": settings.warmup,
        "ranks": settings.ranks,
        "notes": [],
    }
