"""Logs of ranks as the reader gives them, of steps that take known times, and their profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.profile import profile_of
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.profile import Profile
from diagnose.store.reader import RankLog

MS = 1_000_000
Steps = npt.NDArray[np.int64]


def steps_of(count: int, samples: int = 32, tokens: int = 0, **slots_ms: Any) -> Steps:
    """Steps with some slots of so many milliseconds, each one number or one for each step."""
    steps = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    for name, time_ms in slots_ms.items():
        steps[:, COLUMNS.index(name)] = np.asarray(time_ms) * MS
    steps[:, COLUMNS.index("samples")] = samples
    steps[:, COLUMNS.index("tokens")] = tokens
    steps[:, COLUMNS.index("spans")] = 5
    steps[:, 0] = steps[:, len(COUNTS) :].sum(axis=1).cumsum()
    return steps


def log_of(steps: Steps, rank: int = 0, **parts: Any) -> RankLog:
    meta = {
        "rank": rank,
        "host": f"node{rank // 8}",
        "finished": True,
        "torch": "2.13.0",
        **parts.pop("meta", {}),
    }
    return RankLog(path=Path(f"rank{rank}.sqlite"), meta=meta, steps=steps, **parts)


def profile(*logs: RankLog, **manifest: Any) -> Profile:
    return profile_of({"id": "run", "script": "train.py", **manifest}, list(logs))


NOBODY = ("", 0, "")
