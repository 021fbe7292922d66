"""Steps in which a process was stopped, so that another could run: they are in no figure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.analysis.deep_window import Spoilt
from diagnose.analysis.meetings import END
from diagnose.analysis.steps import step_times
from diagnose.store.reader import RankLog
from diagnose.store.runs import Stops, read_stops


def was_stopped(end_N: npt.NDArray[np.int64], time_N: npt.ArrayLike, stops: Stops) -> npt.NDArray[np.bool_]:
    """Returns in which steps a process was stopped.

    Args:
        end_N: When each step ended, shape `(N,)`.
        time_N: What it took, likewise.
        stops: When the process was stopped, in order.

    Returns:
        Shape `(N,)`.
    """
    stop_K, go_on_K = np.array(stops, np.int64).reshape(-1, 2).T
    begin_N = end_N - np.asarray(time_N, np.int64)
    return np.asarray(np.searchsorted(stop_K, end_N) > np.searchsorted(go_on_K, begin_N))


def stopped_steps(log: RankLog) -> Spoilt:
    """Returns the steps in which a rank's run was stopped, as far as it is known to have been."""
    stops = read_stops(log.path.parent)
    if not stops:
        return ()
    stopped_N = was_stopped(log.steps[:, END], step_times(log.steps), stops)
    return tuple((int(step), int(step)) for step in np.flatnonzero(stopped_N))
