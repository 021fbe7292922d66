"""One version in its worktree: where its command runs, and with which paths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from diagnose.gate.result import Side
from diagnose.gate.worktrees import NotInThisVersion


def in_worktree(side: Side, root: Path, repository: Path, *, asker: str) -> Side:
    """Returns a version that stands in the working copy as it stands in its worktree.

    Args:
        side: The version; its folder is where the user stands.
        root: Top folder of the worktree.
        repository: That of the working copy.
        asker: Whose message it is: `gate`.

    Raises:
        NotInThisVersion: If the version has no such folder.
    """
    folder = root / side.folder
    if not folder.is_dir():
        raise NotInThisVersion(
            f"{asker}: {side.name} has no folder {side.folder}; run it where each version has one."
        )
    path = os.environ.get("PYTHONPATH", "")
    environment = {"PYTHONPATH": moved_path(path, repository, root)} if path else {}
    return replace(side, root=folder, environment=environment)


def moved_path(variable: str, repository: Path, root: Path) -> str:
    """Returns a list of folders, such as PYTHONPATH, with those in the repository moved to a worktree."""
    entries = variable.split(os.pathsep)
    return os.pathsep.join(_moved(entry, repository.resolve(), root) if entry else "" for entry in entries)


def _moved(entry: str, top: Path, root: Path) -> str:
    """Moves what lies in the repository, by whatever links its name leads there.

    Links within the repository are left: the worktree has its own.
    """
    absolute = Path(entry).absolute()
    if ".." in absolute.parts:
        absolute = absolute.resolve()
    for outer in (*reversed(absolute.parents), absolute):
        real = outer.resolve()
        if real.is_relative_to(top):
            return str(root / real.relative_to(top) / absolute.relative_to(outer))
    return entry if os.path.isabs(entry) else str(absolute)  # the run begins in another folder
