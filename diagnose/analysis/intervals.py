"""Arithmetic of sets of instants: half-open intervals `[start, end)` in whole nanoseconds.

A set is an int64 array of shape `(intervals, 2)`, in order, none empty, none touching the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Instants = npt.NDArray[np.int64]

NOTHING: Instants = np.zeros((0, 2), dtype=np.int64)


def union(start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64]) -> Instants:
    """Returns the instants that at least one of some intervals holds; they may overlap and be empty."""
    filled = end_ns > start_ns
    start_ns, end_ns = start_ns[filled], end_ns[filled]
    if not len(start_ns):
        return NOTHING
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.concatenate(([True], start_ns[1:] > end_ns[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.column_stack((start_ns[first], end_ns[last]))


def both(one: Instants, other: Instants) -> Instants:
    """Returns the instants of one set and the other."""
    if not len(one) or not len(other):
        return NOTHING
    # Each interval of `one` meets a run of neighbours in `other`.
    low = np.searchsorted(other[:, 1], one[:, 0], side="right")
    high = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    before = np.cumsum(counts) - counts
    theirs = np.arange(counts.sum()) - np.repeat(before, counts) + np.repeat(low, counts)
    return np.column_stack(
        (np.maximum(one[mine, 0], other[theirs, 0]), np.minimum(one[mine, 1], other[theirs, 1]))
    )


def without(one: Instants, other: Instants) -> Instants:
    """Returns the instants of one set that are not of the other."""
    if not len(one):
        return NOTHING
    edges = np.concatenate(([one[0, 0]], other.ravel(), [one[-1, 1]]))
    outside = edges.reshape(-1, 2)
    return both(one, outside[outside[:, 1] > outside[:, 0]])


def length_ns(instants: Instants) -> int:
    """Returns how many nanoseconds a set holds."""
    return int((instants[:, 1] - instants[:, 0]).sum())


def holds(instants: Instants, at_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns for each time whether the set holds it."""
    if not len(instants):
        return np.zeros(len(at_ns), dtype=bool)
    index = np.searchsorted(instants[:, 0], at_ns, side="right") - 1
    found: npt.NDArray[np.bool_] = (index >= 0) & (at_ns < instants[np.maximum(index, 0), 1])
    return found
