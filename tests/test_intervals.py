"""Sets of instants: their arithmetic against one that asks every instant."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diagnose.analysis.intervals import NOTHING, Instants, both, holds, length_ns, union, without

SPAN = 40
PAIRS = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=12)


def made(pairs: list[tuple[int, int]]) -> Instants:
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return union(columns[:, 0], columns[:, 1])


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in pairs for at in range(start, end)}


def asked(found: Instants) -> set[int]:
    return {at for start, end in found.tolist() for at in range(start, end)}


def is_in_order(found: Instants) -> bool:
    return all(start < end for start, end in found) and all(
        before[1] < after[0] for before, after in itertools.pairwise(found)
    )


@given(PAIRS, PAIRS)
def test_sets_agree_with_asking_every_instant(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    one, other = made(first), made(second)
    mine, theirs = instants(first), instants(second)
    for found, expected in (
        (one, mine),
        (both(one, other), mine & theirs),
        (without(one, other), mine - theirs),
    ):
        assert asked(found) == expected
        assert length_ns(found) == len(expected)
        assert is_in_order(found)
    at = np.arange(-1, SPAN + 2)
    assert set(at[holds(one, at)].tolist()) == mine


def test_nothing_is_a_set_too() -> None:
    some = made([(1, 3)])
    assert length_ns(NOTHING) == 0
    assert asked(without(some, NOTHING)) == {1, 2}
    assert asked(both(some, NOTHING)) == asked(without(NOTHING, some)) == set()


def test_intervals_that_touch_are_one() -> None:
    assert made([(5, 7), (0, 5), (9, 9)]).tolist() == [[0, 7]]
