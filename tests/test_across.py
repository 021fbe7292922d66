"""What collectives cost all ranks, from what each of them waits in the same steps."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from diagnose.analysis.across import Across
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase

STEPS = 40


def waiting(*ranks: tuple[object, object], order: tuple[int, ...] = ()) -> Across:
    """Ranks that wait so long in each step: in all that they do together, and of that for gradients.

    Args:
        ranks: Both, of each rank: a number or one for each step.
        order: In which they are taken in.
    """
    each = []
    for place, (together, gradients) in enumerate(ranks):
        series = {phase: np.zeros(STEPS) for phase in Phase}
        series[Phase.COMMUNICATION] = np.broadcast_to(np.asarray(together, dtype=float), STEPS)
        waits_S = np.broadcast_to(np.asarray(gradients, dtype=float), STEPS)
        rows = np.zeros((STEPS, len(COLUMNS)), dtype=np.int64)
        each.append(Across.of(place, series, waits_S, rows))
    first, *others = (each[place] for place in order or range(len(ranks)))
    for other in others:
        first.fold(other)
    return first


FIRST_EARLY = (5.5, 0.5)
"""It waits 5 in a collective, and is then the last to have its gradients."""

FIRST_LATE = (5.0, 4.0)
"""It is the last to come to the collective, which takes 1, and waits for gradients, which take 0.5."""


def test_ranks_that_are_late_in_turn_within_a_step_would_meet_once_without_the_collective() -> None:
    across = waiting(FIRST_EARLY, FIRST_LATE)
    assert across.collective_ns() == pytest.approx(4.5)
    assert across.collective_share() == 1.0


def test_so_would_those_that_change_their_roles_from_step_to_step() -> None:
    is_even = np.arange(STEPS) % 2 == 0
    together, gradients = zip(FIRST_EARLY, FIRST_LATE, strict=True)
    roles = (is_even, np.logical_not(is_even))
    ranks = [(np.where(early, *together), np.where(early, *gradients)) for early in roles]
    assert waiting(*ranks).collective_ns() == pytest.approx(4.5)


@pytest.mark.parametrize(
    "others", [(1.5 + 10, 0.5 + 10), (1.5 + 10, 0.5)], ids=["for gradients", "at the collective"]
)
def test_a_rank_that_is_late_in_every_step_makes_no_collective_dearer(others: tuple[float, float]) -> None:
    assert waiting(others, (1.5, 0.5)).collective_ns() == pytest.approx(1.0)


def test_without_collectives_nothing_is_spent_in_them() -> None:
    is_even = np.arange(STEPS) % 2 == 0
    waits = [np.where(even, 5.0, 0.5) for even in (is_even, np.logical_not(is_even))]
    assert waiting(*((each, each) for each in waits)).collective_ns() == 0


def test_beside_waits_for_a_single_rank_what_they_wait_in_turn_is_not_counted() -> None:
    across = waiting(FIRST_EARLY, FIRST_LATE)
    assert across.collective_ns(exchanges=True) == pytest.approx(1.0)


def test_the_order_of_the_ranks_does_not_matter() -> None:
    ranks = FIRST_EARLY, FIRST_LATE, (4.0, 2.0)
    found = {waiting(*ranks, order=order).collective_ns() for order in permutations(range(3))}
    assert found == {3.5}


def test_one_rank_is_compared_with_nobody() -> None:
    assert waiting(FIRST_EARLY).collective_ns() is None
