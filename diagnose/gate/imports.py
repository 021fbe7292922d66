"""Whether a run in a worktree took its code from there, or from somewhere else."""

from __future__ import annotations

import contextlib
import filecmp
from collections.abc import Sequence
from pathlib import Path

from diagnose.analysis.profile import read_logs
from diagnose.gate.worktrees import git, repository_of

PACKAGES = {"site-packages", "dist-packages"}

SOURCES = ("", "src")
"""Folders of a project that usually hold what is installed of it."""


def why_same_code(
    command: str, run: Path, repository: Path, ran_in: Path, commits: str, links: Sequence[str] = ()
) -> str:
    """Says why all versions would run the same code, and what to do; empty where none was seen.

    An editable installation points into the working copy, whatever worktree a script runs in, and any other
    one is of one version only. Files are taken for what they are, by whatever links their names lead there;
    those that the user linked are meant to.

    Args:
        command: Whose message it is: `gate`.
        run: The run's folder.
        repository: The working copy.
        ran_in: Where it ran, in a worktree, which may itself lie in the working copy.
        commits: What is compared, as `BASE..HEAD`.
        links: Paths that both versions share.
    """
    top, worktree = repository.resolve(), repository_of(ran_in).resolve()
    shared = [(top / link).resolve() for link in links]
    tracked = git(worktree, "ls-files", "-z").split("\0")
    names = git(top, "diff", "--name-only", "--no-renames", "-z", commits, "--").split("\0")
    changed = [Path(name) for name in names if name]
    for file in sorted(_seen(run)):
        folder = _installed_from(file, (worktree, ran_in.resolve()), tracked, changed)
        if folder is not None:
            what, kind = "an installed copy of what stands in the worktree", ""
            importable = top / folder.relative_to(worktree)
        elif (
            file.is_relative_to(top)
            and not file.is_relative_to(worktree)
            and not any(file.is_relative_to(place) for place in shared)
            and not PACKAGES.intersection(file.parts)
        ):
            what, kind = "of the working copy", " (an editable installation?)"
            importable = _outside_packages(file, top)
        else:
            continue
        return (
            f"{command}: the run in a worktree used {file}, {what}: all versions\n"
            f"would run the same code{kind}. Import from the worktree:\n"
            f"PYTHONPATH={importable} diagnose {command} ... (moved to each worktree)"
        )
    return ""


def _outside_packages(file: Path, top: Path) -> Path:
    """Returns the folder that a file's outermost package, or the file itself, is imported from."""
    folder = file.parent
    while folder != top and (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _seen(run: Path) -> set[Path]:
    """Returns the source files that were seen while the run trained, in its workers too. Where no stack
    could be sampled, those of the loop and of what it was made of remain."""
    logs, _ = read_logs(run)
    stacks = [frames for log in logs for _, _, frames, _ in log.samples]
    stacks += [frames for log in logs for frames, _ in log.worker_samples]
    names = {file for frames in stacks for file, _, _ in frames}
    names.update(file for log in logs for file in log.sources)
    return {Path(name).resolve() for name in names if Path(name).is_absolute()}


def _installed_from(
    file: Path, places: Sequence[Path], tracked: Sequence[str], changed: Sequence[Path]
) -> Path | None:
    """Returns the folder of a project in which an installed file stands as well.

    Deeper down, as in `packages/net/net/model.py`, the bytes have to agree, else it may be a namesake of a
    foreign one, and the commits to differ: what both hold alike, such as a vendored library, is no matter.

    Args:
        file: Where it is installed.
        places: The top folder of the worktree, and another one to look in.
        tracked: Paths of the files that git holds.
        changed: Those in which the commits differ.
    """
    index = next((index for index, part in enumerate(file.parts) if part in PACKAGES), None)
    if index is None:
        return None
    inside = Path(*file.parts[index + 1 :])
    for folder in (place / source for place in places for source in SOURCES):
        if (folder / inside).is_file():
            return folder
    end = f"/{inside.as_posix()}"
    for name in tracked:
        if not name.endswith(end):
            continue
        folder = Path(name.removesuffix(end))
        if any(each.is_relative_to(folder) for each in changed) and _is_same(places[0] / name, file):
            return places[0] / folder
    return None


def _is_same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return filecmp.cmp(one, other, shallow=False)
    return False
