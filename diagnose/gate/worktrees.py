"""The two versions side by side on disk, in git worktrees that are gone afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from diagnose.core.errors import DiagnoseError

PREFIX = "diagnose-gate-"

DEAD_AFTER_S = 86_400.0
"""What a gate left in the repository a day ago is nobody's any more. Before, a worktree that cannot be seen
from here may be that of a gate in another container, or on another host."""

LOCK = "lock"
"""File beside the worktrees that is locked for as long as their gate lives, however it dies."""

SUBMODULE = "160000"
"""Mode of an entry that git holds only the commit of."""

TIDY = """
cat
sleep 1
cd "$2" && for name in base head; do git worktree remove --force "$1/$name"; done
rm -rf "$1"
for entry in "$3"/*; do
  case "$(cat "$entry/gitdir")" in */"${1##*/}"/*) rm -rf "$entry" ;; esac
done
"""
"""Waits until whoever holds the other end of its stdin is gone, however it went (kill -9 too), and then
removes what that one can no longer remove. A second later, for the run under way to end first."""


class NotInThisVersion(DiagnoseError):
    """A commit that cannot be run as it was asked for: it lacks something, or has its own."""


def repository_of(folder: Path) -> Path:
    """Returns the top folder of the git repository that `folder` lies in.

    Raises:
        DiagnoseError: If it lies in none, or there is no git.
    """
    return Path(git(folder, "rev-parse", "--show-toplevel"))


def inside_repository(folder: Path) -> str:
    """Returns where a folder lies in its repository, as git writes it; empty at the top, or in none."""
    try:
        inside = folder.resolve().relative_to(repository_of(folder).resolve())
    except (DiagnoseError, ValueError):
        return ""
    return "" if inside == Path() else inside.as_posix()


def refuse_working_copy(repository: Path, command: Sequence[str]) -> None:
    """Refuses a command that names a file which git holds by its place in the working copy: both versions
    would use that one.

    Raises:
        DiagnoseError: If there is one.
    """
    top = repository.resolve()
    for word in command:
        path = Path(word.rpartition("=")[2])
        if not path.is_absolute() or not path.resolve().is_relative_to(top):
            continue
        inside = path.resolve().relative_to(top)
        held = _git(repository, "ls-files", "--error-unmatch", "--", str(inside)).returncode == 0
        if inside != Path() and held:
            raise DiagnoseError(
                f"gate: {word} names the working copy, which both versions would use.\n"
                f"Name it relative to where the gate is run: {os.path.relpath(path.resolve(), Path.cwd())}"
            )


def parse_range(text: str) -> tuple[str, str]:
    """Returns the two names in `BASE..HEAD`; an empty one is HEAD, as git has it.

    `BASE...HEAD` is not a pair of commits but the point where they parted; see `resolve_range`.

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
        commits = commit_of(repository, base), commit_of(repository, head)
        return (base, parted_at(repository, *commits)), (head, commits[1])
    return (base, commit_of(repository, base)), (head, commit_of(repository, head))


def commit_of(repository: Path, name: str) -> str:
    """Returns the hash that a name stands for.

    Raises:
        DiagnoseError: If it stands for no commit; in a shallow clone, says how to get the others.
    """
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found.returncode == 0:
        return found.stdout.strip()
    hint = _hint_if_shallow(repository) or "Is it spelled right, and fetched? See: git branch --all"
    raise DiagnoseError(f"gate: there is no commit {name!r} in {repository}.\n{hint}")


def parted_at(repository: Path, one: str, other: str) -> str:
    """Returns the last commit that two have in common.

    Raises:
        DiagnoseError: If there is none here; in a shallow clone, says how to get the others.
    """
    found = _git(repository, "merge-base", one, other)
    if found.returncode == 0:
        return found.stdout.strip()
    hint = _hint_if_shallow(repository) or "Any two are compared by: diagnose gate --ab BASE..HEAD"
    raise DiagnoseError(
        f"gate: {one[:12]} and {other[:12]} have no commit in common in {repository}.\n{hint}"
    )


def _hint_if_shallow(repository: Path) -> str:
    if _git(repository, "rev-parse", "--is-shallow-repository").stdout.strip() != "true":
        return ""
    return (
        "This clone is shallow; fetch more first: git fetch --unshallow (actions/checkout: fetch-depth: 0)"
    )


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
        NotInThisVersion: If a commit holds what a link should lead to.
        DiagnoseError: If a worktree cannot be made, or a link leads nowhere.
    """
    for link in links:
        _check_link(repository, link)
    records = repository / git(repository, "rev-parse", "--git-common-dir") / "worktrees"
    _forget_dead(records)
    place = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT)
    _has_locked(lock)
    tidy = subprocess.Popen(
        ["sh", "-c", TIDY, "sh", str(place), str(repository), str(records)],
        env=_environment(),
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
        for record, worktree in _recorded(records):
            if place.name in worktree.parts:
                shutil.rmtree(record, ignore_errors=True)
        os.close(lock)
        tidy.kill()
        tidy.communicate()


def _recorded(records: Path) -> Iterator[tuple[Path, Path]]:
    """Yields what git has recorded of each worktree of ours, and where that one was.

    `git worktree prune` is not for us: it forgets every worktree that cannot be seen at the moment, the
    user's too, on a disk or in a container that is not there.
    """
    for record in records.glob("*"):
        with contextlib.suppress(OSError):
            worktree = Path(os.fsdecode((record / "gitdir").read_bytes()).rstrip("\n")).parent
            if worktree.parent.name.startswith(PREFIX):
                yield record, worktree


def _has_locked(lock: int) -> bool:
    """Takes a lock; false where another has it, or the file system has none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _forget_dead(records: Path) -> None:
    """Removes what a power cut left behind, or a container that was killed as a whole."""
    for record, worktree in _recorded(records):
        with contextlib.suppress(OSError):  # another gate may be at it too
            root = record / worktree
            if time.time() - (record / "gitdir").stat().st_mtime <= DEAD_AFTER_S:
                continue
            if root.exists():
                _remove_if_dead(root.parent)
            if not root.exists():
                shutil.rmtree(record)


def _remove_if_dead(place: Path) -> None:
    """Removes the folder of a gate that no longer holds its lock.

    Raises:
        OSError: If there is no lock to ask.
    """
    lock = os.open(place / LOCK, os.O_RDWR)
    try:
        if _has_locked(lock):
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(lock)


def git(folder: Path, *arguments: str) -> str:
    """Returns what git prints, without the last newline.

    Raises:
        DiagnoseError: If git says no; in its words.
    """
    done = _git(folder, *arguments)
    if done.returncode != 0:
        raise DiagnoseError(f"gate: git {arguments[0]} failed in {folder}:\n{done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def _environment() -> dict[str, str]:
    """A gate in a git hook must not use the hook's index and work tree; settings of the user's count."""
    return {name: value for name, value in os.environ.items() if name not in _of_one_repository()}


@functools.cache
def _of_one_repository() -> frozenset[str]:
    """Returns the variables by which git tells a hook which repository it is in."""
    told = subprocess.run(
        ["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True, check=True
    )
    # Settings that come by variables, such as safe.directory, are no repository's.
    return frozenset(name for name in told.stdout.split() if not name.startswith("GIT_CONFIG_"))


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Nor do hooks of the user's belong to a worktree of ours.
    try:
        return subprocess.run(
            ["git", "-c", f"core.hooksPath={os.devnull}", *arguments],
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="surrogateescape",  # a path may be of any bytes
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
    if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        place.rmdir()  # a submodule, which git leaves empty in a new worktree
    if os.path.lexists(place) or not place.parent.resolve().is_relative_to(root):
        raise NotInThisVersion(f"gate: --link {link}: git holds it, so each version already has its own.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotInThisVersion(f"gate: --link {link}: part of that path is a file in a version.") from error
    place.symlink_to(repository / link)


def renamed_files(repository: Path, base: str, head: str) -> dict[str, str]:
    """Returns the paths of files in the head by those that they have in the base, where they were renamed.

    None are known where git cannot tell: of a partial clone it may have to fetch the texts first.
    """
    compare = ("diff-tree", "-r", "-z", "--find-renames", "--diff-filter=R", "--name-status")
    found = _git(repository, *compare, base, head)
    fields = found.stdout.split("\0") if found.returncode == 0 else []
    return dict(zip(fields[1::3], fields[2::3], strict=False))  # "R097", then both paths


def moved_submodules(repository: Path, base: str, head: str, links: Sequence[str]) -> list[str]:
    """Returns the submodules at or under links that are at another commit in the head than in the base.

    Raises:
        DiagnoseError: If a link leads nowhere.
    """
    if not links:
        return []
    for link in links:
        _check_link(repository, link)
    paths = [str(Path(link)) for link in links]  # without the slash that git would take for a folder
    compare = ("--literal-pathspecs", "diff-tree", "-r", "-z", "--raw", "--no-renames")
    fields = git(repository, *compare, base, head, "--", *paths).split("\0")
    changes = zip(fields[::2], fields[1::2], strict=False)  # ":160000 160000 HASH HASH M", then the path
    return [path for change, path in changes if SUBMODULE in change[1:].split()[:2]]


def note_of_submodules(repository: Path, base: str, head: str, links: Sequence[str]) -> tuple[str, ...]:
    """Says of which submodules a comparison sees nothing, because both versions are given the same one."""
    moved = ", ".join(moved_submodules(repository, base, head, links))
    if not moved:
        return ()
    return (f"{moved}: another commit in each version, but --link gave both that of {repository}",)
