"""Which rank the others wait for, from what each of them waited in each step."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose.analysis.meetings import Waits
from diagnose.core.parallel import Meetings

STEPS = 300


def met(own_S: dict[int, np.ndarray]) -> Meetings:
    """What is told of ranks that computed so long in each step, then waited for the longest."""
    longest_S = np.max(list(own_S.values()), axis=0)
    waits, *others = [Waits.of(rank, longest_S - own_S[rank] + 1.0, own_S[rank]) for rank in own_S]
    for other in others:
        waits.fold(other)
    meetings = waits.meetings({rank: rank for rank in own_S})
    assert meetings is not None
    return meetings


def noise(seed: int) -> np.ndarray:
    """Lengths that are mostly alike, and now and then much longer, as on a busy machine."""
    random = np.random.default_rng(seed)
    return 100 + random.exponential(20, STEPS) + 100 * (random.random(STEPS) < 0.1)


def test_a_rank_that_is_always_slower_leads_in_every_stretch_though_it_is_not_always_last():
    meetings = met({0: noise(0) + 12, 1: noise(1)})
    assert 0.6 < meetings.last_share[0] < 0.75
    assert meetings.lead_share[0] >= 0.9
    assert meetings.held_ns[0] > meetings.held_ns[1]


def test_a_rank_that_lost_its_time_in_one_stretch_leads_there_only():
    mine = noise(2)
    mine[30:60] += 1000
    meetings = met({0: mine, 1: noise(3)})
    assert meetings.held_ns[0] > 4 * meetings.held_ns[1]
    assert meetings.lead_share[0] < 0.9


def test_ranks_that_are_alike_take_turns():
    leads = [max(met({0: noise(seed), 1: noise(seed + 1000)}).lead_share.values()) for seed in range(100)]
    assert sum(lead >= 0.9 for lead in leads) <= 10


def test_of_four_ranks_the_slow_one_leads():
    meetings = met({0: noise(0), 1: noise(1), 2: noise(2) + 25, 3: noise(3)})
    assert meetings.lead_share[2] >= 0.9
    assert sum(meetings.lead_share.values()) == 1


def test_a_short_run_has_no_stretches():
    meetings = met({0: noise(0)[:60], 1: noise(1)[:60] + 15})
    assert meetings.lead_share == {}


MANY = 6000


def jitter(seed: int) -> np.ndarray:
    """Lengths that vary by chance."""
    return 200 + np.random.default_rng(seed).normal(0, 20, MANY)


def won(late_S: np.ndarray, *alike: np.ndarray) -> float:
    """By how much steps get shorter if the rank of these lengths loses what it is late by."""
    own_S = alike[0] + late_S
    return float((np.max([own_S, *alike[1:]], axis=0) - np.max(alike, axis=0)).mean())


@pytest.mark.parametrize("late_ns", [0, 12, 40, 200])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_won_of_a_slow_rank_is_what_it_holds_the_others_up_beyond_chance(
    late_ns: float, num_ranks: int
) -> None:
    alike = [jitter(seed) for seed in range(num_ranks)]
    meetings = met({0: alike[0] + late_ns, **dict(enumerate(alike[1:], 1))})
    expected = won(np.full(MANY, late_ns), *alike)
    assert meetings.held_ns[0] - meetings.chance_ns == pytest.approx(expected, rel=0.05, abs=2)


def test_a_rank_that_is_late_in_bursts_is_no_noise() -> None:
    bursts = 1000.0 * (np.arange(MANY) % 20 == 0)
    meetings = met({0: jitter(0) + bursts, 1: jitter(1)})
    expected = won(bursts, jitter(0), jitter(1))
    assert meetings.held_ns[0] - meetings.chance_ns == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("part", [0.3, 0.6])
def test_what_a_rank_is_late_by_may_vary_itself(part: float) -> None:
    """What the other one's own steps differ by tells what is chance."""
    random = np.random.default_rng(3)
    for late_S in (random.exponential(100, MANY), 200.0 * (random.random(MANY) < part)):
        meetings = met({0: jitter(0) + late_S, 1: jitter(1)})
        expected = won(late_S, jitter(0), jitter(1))
        assert meetings.held_ns[0] - meetings.chance_ns == pytest.approx(expected, rel=0.05)


def test_what_both_are_slow_in_at_the_same_time_is_no_chance() -> None:
    both = np.random.default_rng(3).exponential(100, MANY)
    meetings = met({0: jitter(0) + both + 40, 1: jitter(1) + both})
    expected = won(np.full(MANY, 40), jitter(0), jitter(1))
    assert meetings.held_ns[0] - meetings.chance_ns == pytest.approx(expected, rel=0.05)


def test_on_a_busy_machine_no_more_is_taken_for_chance_than_there_is() -> None:
    alike = [np.concatenate([noise(100 * rank + each) for each in range(20)]) for rank in (0, 1)]
    meetings = met({0: alike[0] + 40, 1: alike[1]})
    left = meetings.held_ns[0] - meetings.chance_ns
    assert won(np.full(len(alike[0]), 40), *alike) < left < 40


def test_ranks_that_do_the_same_hold_nobody_up_by_chance() -> None:
    steady = np.full(STEPS, 100.0)
    meetings = met({0: steady + 30, 1: steady})
    assert (meetings.held_ns[0], meetings.chance_ns) == (30.0, 0.0)
