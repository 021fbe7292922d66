"""The steps of a job of several ranks: it has made one when its last rank has.

Legend: N is a step that every rank made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnose.analysis.steps import step_times
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.gate.steps import Vector
from diagnose.store.reader import RankLog

END, SAMPLES, TOKENS = (COLUMNS.index(name) for name in ("end_ns", "samples", "tokens"))
COMPILE = COLUMNS.index(Phase.COMPILE.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSteps:
    """What the ranks of a job did together, step by step.

    Attributes:
        ranks: The ranks that are read, in order.
        missing: Ranks of the job that recorded no step.
        end_N: When the last rank ended it, on the first rank's clock.
        time_N: Nanoseconds from the moment when all ranks had made the step before.
        samples_N: Of all ranks together; 0 where a rank's number is not known. Likewise `tokens_N`.
        compiled_N: Whether any rank compiled something.
        note: Which rank's end cut the steps short, in words; empty where none did.
    """

    ranks: tuple[int, ...]
    missing: tuple[int, ...] = ()
    end_N: npt.NDArray[np.int64]
    time_N: Vector
    samples_N: Vector
    tokens_N: Vector
    compiled_N: npt.NDArray[np.bool_]
    note: str = ""


def job_steps(logs: Sequence[RankLog]) -> JobSteps:
    """Puts the same steps of all ranks together.

    A step takes until the last rank has ended it, so that the times add up to those of the job. The longest
    time that any rank took would not: ranks that take turns at being late would be late in every step.

    Args:
        logs: The ranks that recorded steps, one at least. Of several processes that call themselves one
            rank the first counts.
    """
    by_rank: dict[int, RankLog] = {}
    for log in logs:
        by_rank.setdefault(int(log.meta.get("rank") or 0), log)
    ranks = tuple(sorted(by_rank))
    own = [by_rank[rank] for rank in ranks]
    count = min(len(log.steps) for log in own)
    rows_N = [log.steps[:count] for log in own]
    ends_N = np.max([_on_clock_of(own[0], log)[:count] for log in own], axis=0)
    first_ns = max(int(step_times(rows[:1])[0]) for rows in rows_N)
    time_N = np.diff(ends_N, prepend=ends_N[0] - first_ns).astype(np.float64)
    world_size = max(int(log.meta.get("world_size") or 1) for log in own)
    return JobSteps(
        ranks=ranks,
        missing=tuple(rank for rank in range(world_size) if rank not in by_rank),
        end_N=ends_N,
        time_N=time_N,
        samples_N=_together([rows[:, SAMPLES] for rows in rows_N]),
        tokens_N=_together([rows[:, TOKENS] for rows in rows_N]),
        compiled_N=np.any([rows[:, COMPILE] > 0 for rows in rows_N], axis=0),
        note=_cut_short(by_rank, count),
    )


def _on_clock_of(first: RankLog, log: RankLog) -> npt.NDArray[np.int64]:
    """Returns when a rank's steps ended, on the first rank's clock.

    The ranks of one machine share a clock. Others are taken to end their steps when the first does, by the
    median: how much later a whole machine is does not show in how long its steps take.
    """
    ends: npt.NDArray[np.int64] = log.steps[:, END]
    both = min(len(first.steps), len(ends))
    apart = int(np.median(ends[:both] - first.steps[:both, END]))
    lasted = int(step_times(first.steps).sum()) + int(step_times(log.steps).sum())
    shared = log.meta.get("host") == first.meta.get("host") and abs(apart) < lasted
    return ends if shared else ends - apart


def _together(amounts: Sequence[npt.NDArray[np.int64]]) -> Vector:
    known_N = np.all([amount > 0 for amount in amounts], axis=0)
    return np.where(known_N, np.sum(amounts, axis=0), 0).astype(np.float64)


def _cut_short(by_rank: dict[int, RankLog], count: int) -> str:
    """Says which rank stopped, without having ended, before others did."""
    died = [rank for rank, log in by_rank.items() if not log.meta.get("finished")]
    died = [rank for rank in died if len(by_rank[rank].steps) == count]
    longest = max(len(log.steps) for log in by_rank.values())
    if not died or longest <= count + 1:
        return ""
    return (
        f"rank {died[0]} of {len(by_rank)} stopped after {count} steps without ending, another made "
        f"{longest}: what came after is not counted"
    )
