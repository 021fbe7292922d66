"""Whether a run in a worktree took its code from there, or from somewhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diagnose.analysis.profile import read_logs
from diagnose.gate.worktrees import repository_of

PACKAGES = {"site-packages", "dist-packages"}


def foreign_sources(run: Path, repository: Path, ran_in: Path, links: Sequence[str] = ()) -> list[str]:
    """Returns the source files, seen while the run trained, that lie in the working copy.

    An editable installation points there whatever worktree a script runs in. Files are taken for what they
    are, by whatever links their names lead there; those that the user linked are meant to.

    Args:
        run: The run's folder.
        repository: The working copy.
        ran_in: Where it ran, in a worktree, which may itself lie in the working copy.
        links: Paths that both versions share.
    """
    logs, _ = read_logs(run)
    top, worktree = repository.resolve(), repository_of(ran_in).resolve()
    shared = [(top / link).resolve() for link in links]
    seen = {file for log in logs for _, _, frames, _ in log.samples for file, _, _ in frames}
    files = {Path(file).resolve() for file in seen if Path(file).is_absolute()}
    return sorted(
        str(file)
        for file in files
        if file.is_relative_to(top)
        and not file.is_relative_to(worktree)
        and not any(file.is_relative_to(place) for place in shared)
        and not PACKAGES.intersection(file.parts)
    )
