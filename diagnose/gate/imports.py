"""Whether a run in a worktree took its code from there, or from somewhere else."""

from __future__ import annotations

from pathlib import Path

from diagnose.analysis.profile import read_logs

PACKAGES = ("site-packages", "dist-packages")


def foreign_sources(run: Path, repository: Path) -> list[str]:
    """Returns the source files, seen while the run trained, that lie in the working copy.

    An editable installation points there whatever worktree a script runs in.
    """
    logs, _ = read_logs(run)
    top = str(repository.resolve()) + "/"
    files = {
        file
        for log in logs
        for _, _, frames, _ in log.samples
        for file, _, _ in frames
        if file.startswith(top) and not any(f"/{name}/" in file for name in PACKAGES)
    }
    return sorted(files)
