"""Which of a run's files are of the newest attempt, where a launcher restarted its ranks."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from diagnose.store.meta import read_meta

Life = tuple[float, float]
"""When a file was begun and when it was last written, in seconds since 1970."""


def newest_attempt(files: Sequence[Path], numbers: Sequence[int], restarts: Sequence[int]) -> list[Path]:
    """Returns the files of the newest attempt, in their order.

    The number of restarts is that of a host's own ranks: the agents of other hosts restart theirs too, or
    for a host that joins, and count nothing. But all ranks have ended before any is started anew: where
    processes of a rank were there one after the other, the newest attempt is what has begun since.

    Args:
        files: All files of ranks.
        numbers: The rank of each.
        restarts: How often its ranks had been restarted, by the name of each.
    """
    lives = [_life_now(path) for path in files]
    if any(life is None for life in lives):  # not all by an elastic launcher, or not all can be read
        newest = max(restarts)
        return [path for path, restart in zip(files, restarts, strict=True) if restart == newest]
    known = [life for life in lives if life is not None]
    of_rank: dict[int, list[Life]] = {}
    for number, life in zip(numbers, known, strict=True):
        of_rank.setdefault(number, []).append(life)
    since = max((_ended_before(lives) for lives in of_rank.values()), default=0.0)
    return [path for path, (begun, _) in zip(files, known, strict=True) if begun > since]


def _ended_before(lives: Sequence[Life]) -> float:
    """Returns when a rank's processes had ended before its last one began alone; 0 where none had."""
    ended = before = 0.0
    for begun, end in sorted(lives):
        if ended and begun > ended:
            before = ended
        ended = max(ended, end)
    return before


def _life_now(path: Path) -> Life | None:
    try:
        return _life(path, path.stat().st_mtime_ns, _log_ns(path))
    except OSError:
        return None


def _log_ns(path: Path) -> int:
    """When the log beside a file was written, which what is new lies in; 0 without one."""
    try:
        return path.with_name(f"{path.name}-wal").stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=4096)
def _life(path: Path, written_ns: int, log_ns: int) -> Life | None:
    """Reads when a file was begun and last written; `None` where it does not say, or that no launcher that
    restarts ranks had started the process. The times of the file are those of a copy, and only tell that it
    has to be read anew."""
    try:
        meta = read_meta(path)
        if not meta.get("elastic"):
            return None
        return meta["anchor_ns"][1] / 1e9, float(meta["state"]["updated_unix"])
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError, IndexError):
        return None
