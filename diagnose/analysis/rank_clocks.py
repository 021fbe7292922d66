"""How far the ranks' clocks are apart, by the meetings that ended for all of them at the same moment.

`time.perf_counter` has one zero for all processes of a machine, and another on each machine. All ranks get
the gradients of a pass within the time that a message takes, which is far less than a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from diagnose.analysis.late_bins import bin_width
from diagnose.core.ledger import COLUMNS
from diagnose.core.parallel import ClockOffset

END = COLUMNS.index("end_ns")

MAX_KEPT = 256
"""Meetings of a rank that are compared, evenly chosen: enough for a drift of a microsecond a second."""

MIN_COMMON = 8
"""Fewer do not tell an offset from what a single message was late."""

MAX_DRIFT = 200e-6
"""No two oscillators run further apart: what seems to, in a short run on a busy machine, is lateness."""

Kept = Mapping[int, int]
"""When meetings ended, in nanoseconds of the rank's own clock, by their number."""


def kept(meetings: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> dict[int, int]:
    """Chooses the meetings that are compared: the last one of each step, evenly chosen.

    That is where gradients were averaged, which ends for none before all have come. A rank that is sent the
    buffers of another one may have them before the others have even come.
    """
    if not len(meetings) or not len(steps):
        return {}
    stride = bin_width(len(steps), MAX_KEPT)
    last = np.searchsorted(meetings[:, 0], steps[:, END], side="right") - 1
    met = np.flatnonzero(np.diff(last, prepend=-1) > 0)
    return {int(step): int(meetings[last[step], 1]) for step in met if step % stride == 0}


def clock_offset(first: Kept, other: Kept) -> ClockOffset | None:
    """Returns how far a rank's clock is ahead of the first rank's; `None` with too few meetings."""
    common = sorted(first.keys() & other.keys())
    if len(common) < MIN_COMMON:
        return None
    theirs = np.array([other[number] for number in common], dtype=float)
    ahead = np.array([other[number] - first[number] for number in common], dtype=float)
    begun = theirs[0]
    # By the medians of both halves: a message that was late moves neither.
    half = len(common) // 2
    early, late = slice(None, half), slice(-half, None)
    span = float(np.median(theirs[late]) - np.median(theirs[early]))
    drift = float(np.median(ahead[late]) - np.median(ahead[early])) / span if span > 0 else 0.0
    drift = drift if abs(drift) <= MAX_DRIFT else 0.0
    offset = float(np.median(ahead - drift * (theirs - begun)))
    return ClockOffset(at_ns=int(begun), offset_ns=offset, drift=drift)
