"""Where runs lie, and how they are named and found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnose.core.errors import DiagnoseError

DEFAULT_ROOT = Path(".diagnose") / "runs"
LOST = "lost.txt"
"""Name of the file in which a run says why records of it are lost."""
STOPPED = "stopped.json"
"""Likewise of the file that says when a run was stopped for another to run, in nanoseconds."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""What a run may be called: it becomes a folder's name, and is shown in terminals and browsers."""
RANK_FILE = re.compile(r"rank(\d+)(?:-restart(\d+))?\b")
"""How the name of a rank's file begins, and what it tells; see `store.writer.Writer`."""


def check_name(name: str) -> str:
    """Returns the name of a run if it is fit to be one.

    Raises:
        DiagnoseError: If it is not.
    """
    if not NAME.fullmatch(name):
        raise DiagnoseError(
            f"{name[:60]!r} cannot name a run: use up to 128 letters, digits, '_', '.' and '-', "
            "beginning with a letter or a digit."
        )
    return name


def list_runs(root: Path) -> list[Path]:
    """Returns the folders of all runs under `root`, newest first."""
    if not root.is_dir():
        return []
    runs = [path.parent for path in root.glob("*/run.json") if NAME.fullmatch(path.parent.name)]
    return sorted(runs, key=lambda run: (read_manifest(run).get("started_unix", 0), run.name), reverse=True)


def resolve_run(name: str | None, root: Path) -> Path:
    """Finds a run by name or path; without either, the newest.

    Raises:
        DiagnoseError: If there is no such run.
    """
    if name is None:
        runs = list_runs(root)
        if not runs:
            raise DiagnoseError(f"there are no runs under {root}.\nRecord one: diagnose run train.py")
        return runs[0]
    if os.sep in name or (Path(name) / "run.json").is_file():
        if not (Path(name) / "run.json").is_file():
            raise DiagnoseError(f"{name} is not a run: it holds no run.json.\nList them: diagnose runs")
        return Path(name)
    run = root / check_name(name)
    if not (run / "run.json").is_file():
        raise DiagnoseError(f"there is no run {name!r} under {root}.\nList them: diagnose runs")
    return run


def read_manifest(run: Path) -> dict[str, Any]:
    """Returns what `run.json` says; empty when it cannot be read."""
    try:
        manifest = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def read_lost(run: Path) -> str:
    """Returns why records of a run are lost; empty where none are known to be.

    A disk that takes nothing more may have made the file and left it empty.
    """
    try:
        said = (run / LOST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return said or "The disk had no room left, not even to say which; records are lost."


Stops = Sequence[tuple[int, int]]
"""When a process was stopped and when it went on, in order, in nanoseconds of `time.perf_counter_ns`."""


def keep_stops(run: Path, stops: Stops) -> None:
    """Notes when a run was stopped, so that no figure holds it."""
    (run / STOPPED).write_text(json.dumps(stops), encoding="utf-8")


def read_stops(run: Path) -> Stops:
    """Returns when a run was stopped; nothing where none is known of, or the file is damaged."""
    try:
        told = json.loads((run / STOPPED).read_text(encoding="utf-8"))
        return [(int(stop), int(go_on)) for stop, go_on in told]
    except (OSError, ValueError, TypeError):
        return []


def rank_files(run: Path) -> list[Path]:
    """Returns the files of a run's ranks in the order of ranks; of each rank the first process first.

    Where the ranks were restarted, those of the newest attempt: it is what goes on now, or how the run has
    ended. An attempt may have fewer ranks than that before it.
    """
    files = _files(run)
    numbers, restarts = [*map(number_of, files)], [*map(_restart_of, files)]
    if len(set(numbers)) == len(files) and len(set(restarts)) <= 1:
        return files
    from diagnose.store.attempts import newest_attempt  # which needs sqlite3, and a script may not

    return newest_attempt(files, numbers, restarts)


def earlier_files(run: Path) -> list[Path]:
    """Returns the files of the attempts before the newest one."""
    newest = set(rank_files(run))
    return [path for path in _files(run) if path not in newest]


def number_of(path: Path) -> int:
    """Returns the rank whose file this is."""
    told = RANK_FILE.match(path.name)
    return int(told[1]) if told else 0


def _files(run: Path) -> list[Path]:
    return sorted(
        run.glob("rank*.sqlite"), key=lambda path: (number_of(path), path.name.count("."), path.name)
    )


def _restart_of(path: Path) -> int:
    told = RANK_FILE.match(path.name)
    return int(told[2] or 0) if told else 0
