"""Which rank the others wait for, from what each of them waited in each step."""

from __future__ import annotations

import numpy as np

from diagnose.analysis.meetings import Waits
from diagnose.core.parallel import Meetings

STEPS = 300


def met(own_S: dict[int, np.ndarray]) -> Meetings:
    """What is told of ranks that computed so long in each step, then waited for the longest."""
    longest_S = np.max(list(own_S.values()), axis=0)
    waits, *others = [Waits.of(rank, longest_S - own_S[rank] + 1.0) for rank in own_S]
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
