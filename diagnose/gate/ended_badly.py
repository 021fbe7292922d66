"""How a training command failed, by its exit code and the end of what it wrote to stderr."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from diagnose.gate.result import Failure, TrainingFailed

LAST_LINES = 12
"""Lines of a failed command's stderr that are shown: a traceback's end, with the lines that matter."""

LAST_BYTES = 65_536

FIRST_TO_FAIL = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n){1,5}?\s*rank\s*: (\d+)", re.MULTILINE
)
"""How torchrun names the rank that failed before it ended the others."""

OF_TORCHRUN = re.compile(r"^[EWI]\d{4} .*torch/distributed/", re.MULTILINE)
"""Its own words begin with such a line, after those of the ranks, and would push them out of sight."""


def failed(name: str, code: int | None, stderr: Path) -> TrainingFailed:
    """Returns the exception that says how a run ended.

    Args:
        name: Of the run.
        code: Its exit code; below 0 the signal that ended it; `None` where it left no record of its end.
        stderr: What it wrote there.
    """
    rank, lines = what_failed(_end_of(stderr))
    if code is None:
        reason = f"{name} left no record of how it ended: something killed it, or its folder"
        return TrainingFailed(Failure(run=name, reason=reason, last_lines=lines))
    if code < 0:
        reason = f"{name} was ended by signal {-code} ({signal.Signals(-code).name})"
        return TrainingFailed(Failure(run=name, reason=reason, signal=-code, last_lines=lines))
    reason = f"{name} ended with exit code {code}" + ("" if rank is None else f": rank {rank} failed first")
    return TrainingFailed(Failure(run=name, reason=reason, exit_code=code, last_lines=lines))


def last_lines(stderr: Path) -> tuple[str, ...]:
    """Returns the last lines of what a run wrote to stderr."""
    return _last(_end_of(stderr))


def what_failed(text: str) -> tuple[int | None, tuple[str, ...]]:
    """Returns the rank that failed first, where there are several, and the last lines that say why."""
    found = FIRST_TO_FAIL.search(text)
    if found is None:
        return None, _last(text)
    rank = int(found[1])
    own = "\n".join(line for line in text.splitlines() if line.startswith(f"[rank{rank}]:"))
    words = OF_TORCHRUN.search(text)
    before = text[: words.start()] if words is not None else ""
    return rank, _last(own) or _last(before) or _last(text)


def _last(text: str) -> tuple[str, ...]:
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return tuple(lines[-LAST_LINES:])


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LAST_BYTES))
        return file.read().decode("utf-8", "replace")
