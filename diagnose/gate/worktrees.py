"""The two versions side by side on disk, in git worktrees that are gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from diagnose.core.errors import DiagnoseError

PREFIX = "diagnose-gate-"

TIDY = """
cat
sleep 1
cd "$2" && for name in base head; do git worktree remove --force "$1/$name"; done
rm -rf "$1"
cd "$2" && git worktree prune
"""
"""Waits until whoever holds the other end of its stdin is gone, however it went (kill -9 too), and then
removes what that one can no longer remove. A second later, for the run under way to end first."""


def repository_of(folder: Path) -> Path:
    """Returns the top folder of the git repository that `folder` lies in.

    Raises:
        DiagnoseError: If it lies in none, or there is no git.
    """
    return Path(git(folder, "rev-parse", "--show-toplevel"))


def parse_range(text: str) -> tuple[str, str]:
    """Returns the two names in `BASE..HEAD`; an empty one is HEAD, as git has it.

    `BASE...HEAD` is not a pair of commits but the point where they parted; see `resolve`.

    Raises:
        DiagnoseError: If it is not such a pair.
    """
    base, dots, head = text.partition("..")
    if not dots or not (base or head.lstrip(".")) or ".." in head.lstrip("."):
        raise DiagnoseError(
            f"gate: --ab takes two commits, BASE..HEAD, not {text!r}. For example: --ab main..HEAD"
        )
    return base or "HEAD", head or "HEAD"


def resolve_range(repository: Path, text: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns name and hash of both ends of `BASE..HEAD`; in `BASE...HEAD` base is where HEAD branched off.

    Raises:
        DiagnoseError: If either is no commit here.
    """
    base, head = parse_range(text)
    if head.startswith("."):
        head = head.lstrip(".") or "HEAD"
        parted = git(repository, "merge-base", commit_of(repository, base), commit_of(repository, head))
        return (base, parted), (head, commit_of(repository, head))
    return (base, commit_of(repository, base)), (head, commit_of(repository, head))


def commit_of(repository: Path, name: str) -> str:
    """Returns the hash that a name stands for.

    Raises:
        DiagnoseError: If it stands for no commit; in a shallow clone, says how to get the others.
    """
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode == 0:
        return found.stdout.strip()
    shallow = _git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    hint = (
        "This clone is shallow; fetch more first: git fetch --unshallow (actions/checkout: fetch-depth: 0)"
        if shallow
        else "Is it spelled right, and fetched? See: git branch --all"
    )
    raise DiagnoseError(f"gate: there is no commit {name!r} in {repository}.\n{hint}")


def uncommitted(repository: Path) -> str:
    """Says which changes the gate will not see, because they are in no commit; empty without any."""
    lines = git(repository, "status", "--porcelain", "--untracked-files=no").splitlines()
    if not lines:
        return ""
    files = f"{len(lines)} changed file{'s' if len(lines) > 1 else ''}"
    return f"{files} in {repository} not committed: the gate measures commits, and does not see them"


@contextlib.contextmanager
def worktrees(repository: Path, commits: Sequence[str], links: Sequence[str] = ()) -> Iterator[list[Path]]:
    """Checks out commits, the base and the head, in worktrees of their own and removes them on leaving.

    Their paths are of the same length, and no other gate's: lengths of paths move memory, and memory moves
    times.

    Args:
        repository: Top folder of the repository; its own files are not touched.
        commits: Hashes, one or two.
        links: Paths in the repository that git does not hold, such as data, to be seen in each worktree.

    Raises:
        DiagnoseError: If a worktree cannot be made, or a link leads nowhere.
    """
    for link in links:
        _check_link(repository, link)
    git(repository, "worktree", "prune")  # whatever a power cut left behind
    place = Path(tempfile.mkdtemp(prefix=PREFIX))
    tidy = subprocess.Popen(
        ["sh", "-c", TIDY, "sh", str(place), str(repository)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    roots = [place / name for name, _ in zip(("base", "head"), commits, strict=False)]
    try:
        for root, commit in zip(roots, commits, strict=True):
            git(repository, "worktree", "add", "--detach", "--quiet", str(root), commit)
            for link in links:
                _link(repository, root, link)
        yield roots
    finally:
        for root in roots:
            _git(repository, "worktree", "remove", "--force", str(root))
        shutil.rmtree(place, ignore_errors=True)
        _git(repository, "worktree", "prune")
        tidy.kill()
        tidy.communicate()


def moved_path(variable: str, repository: Path, root: Path) -> str:
    """Returns a list of folders, such as PYTHONPATH, with those in the repository moved to a worktree."""
    moved = []
    for entry in variable.split(os.pathsep):
        absolute = Path(entry).absolute()
        inside = entry and absolute.is_relative_to(repository)
        moved.append(str(root / absolute.relative_to(repository)) if inside else entry)
    return os.pathsep.join(moved)


def git(folder: Path, *arguments: str) -> str:
    """Returns what git prints, without the last newline.

    Raises:
        DiagnoseError: If git says no; in its words.
    """
    done = _git(folder, *arguments)
    if done.returncode != 0:
        raise DiagnoseError(f"gate: git {arguments[0]} failed in {folder}:\n{done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A gate in a git hook must not use the hook's index and work tree; nor do hooks of the user's belong to
    # a worktree of ours.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", "-c", f"core.hooksPath={os.devnull}", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise
        raise DiagnoseError(
            "gate: git is not installed; compare two commands instead: --base-cmd, --head-cmd"
        ) from error


def _check_link(repository: Path, link: str) -> None:
    inside = not os.path.isabs(link) and ".." not in Path(link).parts
    if not inside or not (repository / link).exists():
        raise DiagnoseError(
            f"gate: --link {link}: there is no such path in {repository}.\n"
            "Name it relative to the repository's top folder, such as --link data."
        )


def _link(repository: Path, root: Path, link: str) -> None:
    place = root / link
    if place.is_dir() and not any(place.iterdir()):
        place.rmdir()  # a submodule, which git leaves empty in a new worktree
    if place.exists():
        raise DiagnoseError(f"gate: --link {link}: git holds it, so each version already has its own.")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(repository / link)
