"""Pairs of runs, compared when they are asked for and again when more of them is written."""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic

from diagnose.dashboards._analyst import Analyst, Answer
from diagnose.dashboards._tailing import stamp_of

from diagnose.analysis.beside import ANALYSE_SHARE
from diagnose.store.runs import rank_files, read_manifest

AGAIN_S = 30.0
"""Runs that go on are compared again so seldom; and more seldom where that would take more than
`ANALYSE_SHARE` of one CPU."""

REFUSED_S = 60.0
"""Two runs that could not be compared are tried again after so long: another process may have needed the
memory."""


class Comparisons:
    """The pairs that pages have asked for.

    Args:
        analyst: Compares them.
    """

    def __init__(self, analyst: Analyst) -> None:
        self._analyst = analyst
        self._lock = threading.Lock()
        self._pairs: dict[tuple[Path, Path], _Pair] = {}

    def of(self, before: Path, after: Path) -> Answer | None:
        """Returns the last answer, also while another is being made; `None` while there is none yet."""
        written = (_written(before), _written(after))
        with self._lock:
            pair = self._pairs.setdefault((before, after), _Pair())
            if pair.is_due(written, may_change=not (_is_over(before) and _is_over(after))):
                pair.ask(written)
                self._analyst.compare(before, after, pair.told)
        return pair.answer


class _Pair:
    """Two runs, as they were when they were compared last."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._written: object = None
        self._asked_at: float | None = None  # while an answer is being made
        self._told_at = -1e9
        self._took_s = 0.0

    def is_due(self, written: object, *, may_change: bool) -> bool:
        """Whether the runs are to be compared now."""
        if self._asked_at is not None:
            return False
        since_s = monotonic() - self._told_at
        if isinstance(self.answer, str):
            return since_s > REFUSED_S
        if written == self._written:
            return False
        return not may_change or since_s > max(AGAIN_S, self._took_s / ANALYSE_SHARE)

    def ask(self, written: object) -> None:
        """Notes what is being compared."""
        self._written, self._asked_at = written, monotonic()

    def told(self, answer: Answer) -> None:
        """Takes the answer, in another thread."""
        assert self._asked_at is not None
        self.answer, self._told_at = answer, monotonic()
        self._took_s, self._asked_at = self._told_at - self._asked_at, None


def _written(run: Path) -> object:
    """Returns what changes when a run is written to, or recorded again."""
    return [stamp_of(path) for path in (run / "run.json", *rank_files(run))]


def _is_over(run: Path) -> bool:
    return bool(read_manifest(run).get("ended_unix"))
