"""The folder of one run, and `run.json` in it: what was run, when, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from diagnose.store.runs import read_manifest

SCHEMA = 1

MAX_STEM = 60
"""Characters of a name that go into a folder's name: it stays readable in a list, and far from the 255
bytes that file systems allow."""


def folder_name(started: time.struct_time, name: str) -> str:
    """Returns `YYYYmmdd-HHMMSS-name`, with every character outside `[A-Za-z0-9_.-]` made a dash."""
    return f"{time.strftime('%Y%m%d-%H%M%S', started)}-{named(name)}"


def named(name: str) -> str:
    """Returns a name with every character outside `[A-Za-z0-9_.-]` made a dash."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)[:MAX_STEM].strip("-.") or "run"


def common_folder(root: Path, name: str, late_s: float, *, is_first: bool | None) -> tuple[str, bool]:
    """Returns the folder's name for a job of several hosts, and whether this process is its first.

    The folder of another host is joined; that of an earlier job of this name is not: it has ended, or began
    too long ago, or has a first already. Then `-2`, `-3`, ... is added, as all hosts do.

    Args:
        root: Folder that holds the runs.
        name: The name, the same on every host.
        late_s: How much earlier another host may have begun.
        is_first: Whether this is the first of all; `None` if whoever makes the folder is.
    """
    for path in _numbered(root / name):
        manifest = read_manifest(path)
        try:
            began = manifest.get("started_unix") or path.stat().st_mtime
        except OSError:
            return path.name, is_first is not False
        is_over = manifest.get("ended_unix") is not None or time.time() - began > late_s
        if not is_over and not (is_first and manifest):
            return path.name, bool(is_first)
    raise AssertionError("unreachable")


def given_folder(path: Path, *, launched: float | None, is_restarted: bool = False) -> Path:
    """Returns the folder that the user gave for one run; if one has ended there, `-2`, `-3`, ... is added.

    Args:
        path: The folder; it need not exist.
        launched: When the launcher of this rank started; what has ended since was an attempt of the same
            job, and is joined.
        is_restarted: Whether that is known without; the newest folder is joined.
    """
    for found, following in pairwise(_numbered(path)):
        ended = read_manifest(found).get("ended_unix")
        if ended is None or (launched is not None and launched < ended):
            return found
        if is_restarted and not following.exists():
            return found
    raise AssertionError("unreachable")


def create(root: Path, name: str, *, shared: bool = False) -> Path:
    """Makes the folder of a run in `root` and returns its absolute path.

    Args:
        root: Folder that holds the runs; made when missing.
        name: Name of the run's folder. When it is taken, `-2`, `-3`, ... is added.
        shared: Whether other processes record into the folder too; it may then exist.

    Raises:
        OSError: If the folder cannot be made.
    """
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    if root.parent.name == ".diagnose":
        _keep_out_of_git(root.parent)
    if shared:
        (root / name).mkdir(exist_ok=True)
        return root / name
    for path in _numbered(root / name):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def _numbered(path: Path) -> Iterator[Path]:
    """Yields a path, then those with `-2`, `-3`, ... added to its name."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def temporary_root() -> Path:
    """Returns a folder for runs that only this user can reach, where the wanted one cannot be written.

    The same for every rank on this host, so it has a known name, and is refused when another user made it.

    Raises:
        OSError: If there is no such place.
    """
    import tempfile  # only needed here; costs milliseconds of every start

    root = Path(tempfile.gettempdir()) / f"diagnose-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(13, "belongs to another user", str(root))
    return root


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes `run.json` so that a reader sees the old one or the new one, never half of one.

    On a full disk an existing file is overwritten in place: its block is its own already.

    Raises:
        OSError: If neither could be written.
    """
    path = folder / "run.json"
    data = (json.dumps({"schema": SCHEMA, **manifest}, indent=1) + "\n").encode()
    beside = folder / f".run.json.{os.getpid()}"
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        if not path.exists():
            raise
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()


def has_room(folder: Path) -> bool:
    """Whether the folder's file system takes another block."""
    told = os.statvfs(folder)
    free = told.f_bfree if os.geteuid() == 0 else told.f_bavail  # root may use what is kept back
    return free > 0 or not told.f_blocks


def _keep_out_of_git(folder: Path) -> None:
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
