"""The search for the commit that lost the speed, by measurements that err."""

from __future__ import annotations

import random

import pytest

from diagnose.gate.posterior import CannotRun, Odds, scatter_of, search

DROP = 0.05


def searched(
    seed: int,
    num_commits: int,
    scatter: float = 0.015,
    *,
    tails: bool = False,
    num_broken: int = 0,
    max_pairs: int = 100,
) -> tuple[int, Odds]:
    """A search among simulated commits; returns the one to find, and what was found."""
    chance = random.Random(seed)
    culprit = chance.randrange(num_commits)
    own = [chance.gauss(0, 0.002) for _ in range(num_commits)]
    broken = set(chance.sample(range(num_commits - 1), num_broken))

    def noise() -> float:
        burst = chance.uniform(-6, 6) * scatter if tails and chance.random() < 0.1 else 0.0
        return chance.gauss(0, scatter) + burst

    def measure(index: int) -> float:
        if index in broken:
            raise CannotRun
        return own[index] + (DROP if index >= culprit else 0.0) + noise()

    found = search(
        num_commits,
        measure,
        ends=[DROP + noise() for _ in range(10)],
        confidence=0.95,
        may_go_on=lambda odds: odds.num_pairs < max_pairs,
    )
    return culprit, found


@pytest.mark.parametrize("num_commits", [2, 9, 40])
@pytest.mark.parametrize("tails", [False, True], ids=["normal", "heavy tails"])
def test_the_commit_named_is_the_right_one_in_95_of_100(num_commits: int, tails: bool) -> None:
    found = [searched(seed, num_commits, tails=tails) for seed in range(100)]
    right = sum(culprit in odds.suspects()[0] for culprit, odds in found)
    assert right >= 95


def test_commits_that_do_not_run_are_not_told_from_the_next_that_does() -> None:
    found = [searched(seed, 12, num_broken=4) for seed in range(60)]
    assert sum(culprit in odds.suspects()[0] for culprit, odds in found) >= 57
    assert any(len(odds.suspects()[0]) > 1 for _, odds in found)
    assert all(not set(odds.pairs) & odds.skipped for _, odds in found)


def test_fewer_pairs_are_needed_than_commits() -> None:
    pairs = [searched(seed, 100, 0.01)[1].num_pairs for seed in range(30)]
    assert sum(pairs) / len(pairs) < 20


def test_one_wrong_answer_does_not_mislead_the_search() -> None:
    """A plain bisection of 16 commits that believes the first answer, here a lie, never recovers."""
    asked: list[int] = []

    def measure(index: int) -> float:
        asked.append(index)
        is_slow = index >= 12
        return (0.0 if is_slow else DROP) if len(asked) == 1 else (DROP if is_slow else 0.0)

    ends = [DROP + wobble for wobble in (-0.02, -0.01, -0.01, 0.0, 0.0, 0.01, 0.01, 0.02)]
    odds = search(16, measure, ends=ends, confidence=0.95)
    assert odds.suspects()[0] == range(12, 13)
    assert len(asked) > len(set(asked)), "some commit was asked again"


def test_a_search_that_is_stopped_names_its_odds() -> None:
    _, odds = searched(1, 40, 0.05, max_pairs=2)
    assert odds.num_pairs == 2
    assert odds.suspects()[1] < 0.95
    assert sum(odds.of) == pytest.approx(1)


def test_two_commits_that_lost_alike_end_the_search_soon_and_one_never_looks_like_two() -> None:
    def two(seed: int, sizes: tuple[float, float]) -> Odds:
        chance = random.Random(seed)
        return search(
            20,
            lambda index: sizes[0] * (index >= 5) + sizes[1] * (index >= 13) + chance.gauss(0, 0.01),
            ends=[sum(sizes) + chance.gauss(0, 0.01) for _ in range(10)],
            confidence=0.95,
            may_go_on=lambda odds: odds.num_pairs < 100,
        )

    found = [two(seed, (0.05, 0.05)) for seed in range(30)]
    assert sum(odds.suspects()[1] < 0.95 and odds.num_pairs < 30 for odds in found) >= 28
    larger = [two(seed, (0.1, 0.02)) for seed in range(30)]
    assert sum(odds.suspects() == (range(5, 6), pytest.approx(1, abs=0.05)) for odds in larger) >= 28
    assert all(searched(seed, 20)[1].suspects()[1] >= 0.95 for seed in range(60))


def test_one_commit_needs_no_search() -> None:
    odds = search(1, lambda index: 1 / 0, ends=[DROP] * 7, confidence=0.95)
    assert odds.suspects() == (range(1), 1.0)


def test_when_none_between_runs_all_are_suspects_together() -> None:
    def measure(index: int) -> float:
        raise CannotRun

    odds = search(5, measure, ends=[DROP] * 7, confidence=0.95)
    assert odds.suspects() == (range(5), pytest.approx(1.0))


def test_the_scatter_is_that_of_pairs_around_their_own_commit() -> None:
    chance = random.Random(3)
    groups = [[level + chance.gauss(0, 0.02) for _ in range(5)] for level in range(200)]
    assert scatter_of(groups) == pytest.approx(0.02, rel=0.15)
