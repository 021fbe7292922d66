"""How much longer the steps are in which something is on that is not in the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COUNTS
from diagnose.core.phases import Phase
from diagnose.core.series import MOST_TIMES, NowAndThen

Vector = npt.NDArray[np.float64]

LEAST_STEPS = 5
"""Of either kind: fewer tell nothing."""

HARDLY = 0.1
"""Part of a step: what is switched on in its last tenth is on in the next. A step is over where the next
pass begins, and a script may switch on what that is to run under before."""

CLEARLY = 3.0
"""Standard errors by which steps have to be longer, and phases, too."""


def now_and_then(
    facts: Mapping[str, Any], rows: npt.NDArray[np.int64], phases: Mapping[Phase, Vector]
) -> dict[str, NowAndThen]:
    """Compares the steps in which each thing was on with the others.

    Args:
        facts: What one rank's hooks found.
        rows: Its measured steps.
        phases: Nanoseconds of each phase in each of them, of shape `(steps,)`.
    """
    ends = rows[:, COUNTS.index("end_ns")]
    begins = ends - rows[:, len(COUNTS) :].sum(axis=1)
    found: dict[str, NowAndThen] = {}
    for name, times in facts.get("now_and_then", {}).items():
        on = np.zeros(len(rows), dtype=bool)
        count, known = 0, len(rows)
        for begun_ns, ended_ns in times:
            first, after = np.searchsorted(ends, begun_ns), np.searchsorted(begins, ended_ns, side="right")
            if after - first > 1 and ends[first] - begun_ns < HARDLY * (ends[first] - begins[first]):
                first += 1
            on[first:after] = True
            count += bool(first < after)
            if len(times) >= MOST_TIMES:  # later ones were not noted
                known = int(after)
        on = on[:known]
        if min(on.sum(), (~on).sum()) >= LEAST_STEPS:
            more = {phase: _more(each[:known], on) for phase, each in phases.items()}
            total = _more(sum((each[:known] for each in phases.values()), np.zeros(known)), on)
            found[name] = NowAndThen(
                times=count,
                share=float(on.mean()),
                more_ns={phase: ns for phase, ns in more.items() if ns and total},
            )
    return found


def _more(times: Vector, on: npt.NDArray[np.bool_]) -> float:
    """Returns what these steps take more than the others, per step of all; 0 where that may be chance."""
    with_it, without = times[on], times[~on]
    more = float(with_it.mean() - without.mean())
    error = math.sqrt(with_it.var(ddof=1) / len(with_it) + without.var(ddof=1) / len(without))
    return more * float(on.mean()) if more > CLEARLY * error else 0.0
