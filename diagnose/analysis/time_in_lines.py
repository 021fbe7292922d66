"""How much of each step this rank spends in lines of a kind: those that wait, work on a batch, gather."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from diagnose.analysis.gaps import measured_samples
from diagnose.core.ledger import COMMUNICATION, COUNTS, FIRST_GAP
from diagnose.core.phases import Phase
from diagnose.source.idioms import Idioms
from diagnose.source.purposes import WAIT
from diagnose.source.roles import Roles
from diagnose.store.reader import Frame, RankLog


def standing_ns(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles, idioms: Idioms
) -> float:
    """Returns nanoseconds of the mean step in lines that only wait, in the loop and for nothing else.

    Args:
        log: One rank's records.
        rows: Its measured steps.
        warmup: Leading steps whose samples are left out.
        roles: Tells what a line between hooks serves.
        idioms: Tells what a line is there for.
    """

    def stands(stack: Sequence[Frame], slot: int) -> bool:
        waits = slot >= FIRST_GAP and WAIT in idioms.of_line(*stack[0][:2])
        return waits and roles.phase(stack, slot) is Phase.OTHER

    return _spent_ns(log, rows, warmup, stands)


def working_ns(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles, idioms: Idioms
) -> float:
    """Returns nanoseconds of the mean step in which the loop works on a batch that it has, before the model
    gets it. Arguments as of `standing_ns`."""

    def works(stack: Sequence[Frame], slot: int) -> bool:
        waits = slot < FIRST_GAP or WAIT in idioms.of_line(*stack[0][:2])
        return not waits and roles.works_on_batch(stack, slot)

    return _spent_ns(log, rows, warmup, works)


def gathering_ns(log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles) -> float:
    """Returns nanoseconds of the mean step in collectives that get what the loss or a batch is made of.
    Arguments as of `standing_ns`."""

    def gathers(stack: Sequence[Frame], slot: int) -> bool:
        return slot == COMMUNICATION and roles.gathers_loss(stack)

    return _spent_ns(log, rows, warmup, gathers)


def _spent_ns(
    log: RankLog,
    rows: npt.NDArray[np.int64],
    warmup: int,
    wanted: Callable[[Sequence[Frame], int], bool],
) -> float:
    """Returns nanoseconds of the mean step in stacks, each of a slot, that are wanted."""
    sampled: dict[int, float] = defaultdict(float)
    found: dict[int, float] = defaultdict(float)
    for slot, (_, *stack), weight_ns in measured_samples(log, warmup):
        sampled[slot] += weight_ns
        if stack and wanted(stack, slot):
            found[slot] += weight_ns
    mean_ns = rows[:, len(COUNTS) :].mean(axis=0) if len(rows) else np.zeros(rows.shape[1])
    return sum((float(mean_ns[slot]) * ns / sampled[slot] for slot, ns in found.items()), 0.0)
