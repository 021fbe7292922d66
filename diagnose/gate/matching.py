"""Lines of one version of the sources matched with those of another."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

MIN_LIKENESS = 0.6
"""A line that was edited keeps this part of its characters; a new one beside it does so by chance only."""

MIN_MOVED = 12
"""Characters by which a line is known again elsewhere in the file; shorter ones are many: `continue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMatch:
    """One file in two versions.

    Attributes:
        after_of: Line number in the second version of each line of the first that is still there, edited,
            moved or neither.
        changed: Lines of the second version that the first does not have as they are.
        statement_of: First line of the statement that each line of the second version is part of.
        is_read: Whether either version could be read. If not, lines are taken to be where they were.
    """

    after_of: Mapping[int, int] = field(default_factory=dict)
    changed: frozenset[int] = frozenset()
    statement_of: Mapping[int, int] = field(default_factory=dict)
    is_read: bool = True

    def in_diff(self, line: int) -> bool:
        """Whether the statement on a line of the second version was changed, or is new."""
        if line in self.changed:
            return True
        first = self.statement_of.get(line)
        return first is not None and any(self.statement_of.get(other) == first for other in self.changed)


class Matching:
    """Matches the files of two folders, each once it is asked for.

    Args:
        before: Root of the first version's sources.
        after: Root of the second's.
        renamed: Paths of the second version by those of the first, where they differ.
    """

    def __init__(self, before: Path, after: Path, renamed: Mapping[str, str] | None = None) -> None:
        self._before, self._after = before, after
        self._renamed = dict(renamed or {})
        self._former = {new: old for old, new in self._renamed.items()}
        self._matches: dict[str, FileMatch] = {}

    def place_before(self, file: str, line: int) -> tuple[str, int | None]:
        """Returns where a line of the first version stands in the second; no line where it is gone."""
        name = relative(file, self._before)
        after = self._renamed.get(name, name)
        if Path(after).is_absolute() or after.startswith("<"):
            return after, line  # outside both versions: the same file for both
        match = self.match(after)
        return after, match.after_of.get(line) if match.is_read else line

    def place_after(self, file: str) -> str:
        """Returns the name of a file of the second version."""
        return relative(file, self._after)

    def in_diff(self, file: str, line: int) -> bool:
        """Whether the versions differ in a statement; `file` as `place_after` names it."""
        return not Path(file).is_absolute() and self.match(file).in_diff(line)

    def match(self, file: str) -> FileMatch:
        """Returns how a file, named as in the second version, came out of the first."""
        if file not in self._matches:
            before = read(self._before / self._former.get(file, file))
            self._matches[file] = match_texts(before, read(self._after / file))
        return self._matches[file]


def match_texts(before: str | None, after: str | None) -> FileMatch:
    """Matches the lines of two texts; `None` is a file that is not there."""
    if after is None:
        return FileMatch(is_read=before is not None)
    # As Python counts lines: to `splitlines` a form feed ends one, too.
    old, new = (text.rstrip("\n").split("\n") if text else [] for text in (before, after))
    if old == new:
        same = {number: number for number in range(1, len(new) + 1)}
        return FileMatch(after_of=same, statement_of=statements(after))
    after_of: dict[int, int] = {}
    changed: set[int] = set()
    for tag, low, high, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            after_of.update({low + k + 1: first + k + 1 for k in range(high - low)})
            continue
        changed.update(range(first + 1, last + 1))
        after_of.update(_edited(old, new, range(low, high), range(first, last)))
    after_of.update(_moved(old, new, after_of))
    return FileMatch(after_of=after_of, changed=frozenset(changed), statement_of=statements(after))


def _edited(old: list[str], new: list[str], lines: range, candidates: range) -> dict[int, int]:
    """Matches the lines of a hunk by likeness, in order; in one of equal length, line by line."""
    if len(lines) == len(candidates):
        return {low + 1: first + 1 for low, first in zip(lines, candidates, strict=True)}
    found: dict[int, int] = {}
    begin = candidates.start
    for low in lines:
        for first in range(begin, candidates.stop):
            likeness = SequenceMatcher(None, old[low].strip(), new[first].strip(), autojunk=False)
            if likeness.quick_ratio() >= MIN_LIKENESS and likeness.ratio() >= MIN_LIKENESS:
                found[low + 1] = first + 1
                begin = first + 1
                break
    return found


def _moved(old: list[str], new: list[str], after_of: Mapping[int, int]) -> dict[int, int]:
    """Matches lines that are gone from one place and stand at another, where there is but one like it."""
    kept = {*after_of.values()}
    gone = _by_text((number, line) for number, line in enumerate(old, 1) if number not in after_of)
    come = _by_text((number, line) for number, line in enumerate(new, 1) if number not in kept)
    both = [(gone[text], come[text]) for text in gone.keys() & come.keys()]
    return {one[0]: other[0] for one, other in both if len(one) == len(other) == 1}


def _by_text(lines: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, line in lines:
        if len(line.strip()) >= MIN_MOVED:
            found.setdefault(line.strip(), []).append(number)
    return found


def statements(text: str) -> dict[int, int]:
    """Returns the first line of the innermost statement that each line is part of."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    first: dict[int, int] = {}
    for node in ast.walk(tree):  # outer statements come before those in them
        if isinstance(node, ast.stmt):
            inner = [child.lineno for child in ast.walk(node) if isinstance(child, ast.stmt)]
            end = min((line for line in inner if line > node.lineno), default=None)
            last = end - 1 if end is not None else node.end_lineno or node.lineno
            first.update(dict.fromkeys(range(node.lineno, last + 1), node.lineno))
    return first


def relative(file: str, root: Path) -> str:
    """Returns a path relative to `root`, with `/`; as it is where it lies elsewhere or is none."""
    for top in (root, root.resolve()):  # the interpreter may have resolved a link in the path
        if Path(file).is_relative_to(top):
            return Path(file).relative_to(top).as_posix()
    return file


def read(path: Path) -> str | None:
    """Returns a source text, or `None` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
