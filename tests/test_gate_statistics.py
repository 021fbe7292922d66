"""Pairs to pass, regression, or cannot tell: how often the rule errs, and that its arithmetic is right."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from diagnose.gate.pairs import drop_of, log_of
from diagnose.gate.result import Metric
from diagnose.gate.statistics import (
    LOOKS,
    MAX_ERROR,
    MAX_PAIRS,
    MIN_PAIRS,
    State,
    chance_of_excess,
    decide,
    hodges_lehmann,
    interval_95,
    standard_error,
)
from diagnose.gate.steps import find_warmup, usual_cost

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
try:
    from gate_simulation import DROPS, RULES, SCENES, history_alarms, mann_whitney, rates
finally:
    sys.path.pop(0)

LIMIT = log_of(0.03, Metric.SAMPLES_PER_S)
TRIALS = 120


def at_most(trials: int, rate: float, chance: float = 1e-3) -> int:
    """The number of events that is exceeded with `chance` at most, if each trial has one at `rate`."""
    total, count = (1 - rate) ** trials, 0
    while 1 - total > chance:
        count += 1
        total += math.comb(trials, count) * rate**count * (1 - rate) ** (trials - count)
    return count


def judged(logs: list[float]) -> tuple[State, int]:
    for pairs in range(1, len(logs) + 1):
        state = decide(logs[:pairs], LIMIT).state
        if state is not State.GO_ON:
            return state, pairs
    return State.GO_ON, len(logs)


# -- the rule


def test_the_bound_on_events_is_the_binomial_one() -> None:
    assert at_most(100, 0.5) == 65, "three standard deviations of 5 above 50"
    assert at_most(1, 0.5) == 1
    assert at_most(10, 0.0001) == 0


@pytest.mark.parametrize("scene", SCENES)
def test_identical_programs_raise_at_most_one_alarm_in_two_hundred(scene: str) -> None:
    found = rates(SCENES[scene], 0.0, TRIALS, {"ours": RULES["diagnose gate"]}, seed=11)["ours"]
    assert found.alarms * TRIALS <= at_most(TRIALS, 0.005)
    if SCENES[scene].judged:
        assert found.cannot_tell * TRIALS <= at_most(TRIALS, 0.02)
        assert found.pairs <= 15


@pytest.mark.parametrize("scene", [name for name in SCENES if SCENES[name].judged])
def test_a_drop_of_five_percent_is_found_where_the_machine_allows_it(scene: str) -> None:
    found = rates(SCENES[scene], 0.05, TRIALS, {"ours": RULES["diagnose gate"]}, seed=12)["ours"]
    missed = (1 - found.alarms) * TRIALS
    assert missed <= at_most(TRIALS, 0.05)


@pytest.mark.parametrize("scene", SCENES)
def test_a_drop_of_ten_percent_never_passes(scene: str) -> None:
    found = rates(SCENES[scene], 0.10, TRIALS, {"ours": RULES["diagnose gate"]}, seed=13)["ours"]
    passed = (1 - found.alarms - found.cannot_tell) * TRIALS
    assert round(passed) == 0


def test_the_simulation_tells_rules_apart() -> None:
    """A simulation in which everything is found and nothing alarms would prove nothing."""
    found = rates(SCENES["CI"], 0.0, TRIALS, RULES, seed=14)
    assert found["Mann-Whitney 1 % on steps, 1 run each"].alarms > 0.15
    assert found["mean > 3 %, 1 run each"].alarms > 0.05
    assert found["diagnose gate"].alarms < 0.05
    assert 0.2 < rates(SCENES["CI"], DROPS[1], TRIALS, RULES, seed=15)["diagnose gate"].alarms < 0.8


def test_alarms_against_a_history_are_rarer_than_with_the_usual_threshold() -> None:
    ours, usual = (history_alarms("CI", jobs=10, rule=rule, trials=20_000) for rule in ("sd", "mad"))
    assert ours <= 0.0065
    assert usual > 2 * ours


def test_steady_pairs_are_judged_after_seven() -> None:
    steady = [0.001 * (-1) ** index for index in range(MAX_PAIRS)]
    assert judged(steady) == (State.PASS, MIN_PAIRS)
    assert judged([0.05 + log for log in steady]) == (State.REGRESSION, MIN_PAIRS)


def test_a_gain_passes() -> None:
    assert judged([-0.2 + 0.001 * index for index in range(MAX_PAIRS)]) == (State.PASS, MIN_PAIRS)


def test_what_is_near_the_limit_gets_all_pairs() -> None:
    scattered = [LIMIT + 0.01 * (-1) ** index for index in range(MAX_PAIRS)]
    assert judged(scattered)[1] == MAX_PAIRS


def test_hopeless_pairs_are_given_up_early() -> None:
    wild = [0.3 * (-1) ** (index // 2) + 0.01 * index for index in range(MAX_PAIRS)]
    assert judged(wild) == (State.INCONCLUSIVE, LOOKS[2])


def test_a_huge_loss_is_a_loss_on_the_wildest_machine() -> None:
    rng = random.Random(5)
    assert judged([0.8 + rng.gauss(0, 0.15) for _ in range(MAX_PAIRS)])[0] is State.REGRESSION


@pytest.mark.parametrize("pairs", range(1, MIN_PAIRS))
def test_fewer_than_seven_pairs_never_tell(pairs: int) -> None:
    assert decide([0.5] * pairs, LIMIT, last=True).state is State.INCONCLUSIVE
    assert decide([0.5] * pairs, LIMIT).state is State.GO_ON


def test_a_wild_pair_costs_pairs_but_decides_nothing() -> None:
    steady = [0.002 * (-1) ** index for index in range(MAX_PAIRS)]
    for place in range(MAX_PAIRS):
        one_wild = [*steady[:place], 3.0, *steady[place + 1 :]]
        assert judged(one_wild)[0] is State.PASS
        assert judged([0.05 + log for log in one_wild])[0] is State.REGRESSION


def test_the_detectable_drop_is_stated_beyond_the_limit() -> None:
    logs = [0.01 * (-1) ** index for index in range(10)]
    decision = decide(logs, LIMIT, last=True)
    assert decision.detectable == pytest.approx(LIMIT + 1.645 * decision.error)
    wild = decide([10 * log for log in logs], LIMIT, last=True)
    assert wild.error > MAX_ERROR
    assert wild.detectable == pytest.approx(LIMIT + 5.645 * wild.error)


# -- its arithmetic


def test_the_estimate_is_the_median_of_all_averages() -> None:
    values = [0.0, 1.0, 5.0]
    averages = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)]
    assert hodges_lehmann(values) == statistics.median(averages) == 1.75


def test_the_chance_of_an_excess_is_that_of_counting_all_signs() -> None:
    values = [0.3, -0.1, 0.2, 0.5, 0.5, -0.2, 0.9]
    ranks = {0.1: 1.0, 0.2: 2.5, 0.3: 4.0, 0.5: 5.5, 0.9: 7.0}
    seen = sum(ranks[abs(value)] for value in values if value > 0)
    sums = [
        sum(ranks[abs(value)] for value, up in zip(values, signs, strict=True) if up)
        for signs in itertools.product((True, False), repeat=len(values))
    ]
    assert chance_of_excess(values) == pytest.approx(sum(total >= seen for total in sums) / len(sums))
    assert chance_of_excess([0.0, 0.0]) == 1.0
    assert chance_of_excess([0.1] * MIN_PAIRS) == 2**-MIN_PAIRS


@pytest.mark.parametrize("pairs", [7, 10, 20])
def test_the_interval_covers_the_truth_in_ninety_five_of_a_hundred(pairs: int) -> None:
    rng, trials = random.Random(pairs), 400
    missed = 0
    for _ in range(trials):
        low, high = interval_95([rng.gauss(0, 1) / math.sqrt(rng.uniform(0.2, 1)) for _ in range(pairs)])
        missed += not low <= 0 <= high
    assert missed <= at_most(trials, 0.05)
    assert missed >= 3, "an interval that never misses is too wide"


def test_the_error_shrinks_with_the_root_of_the_pairs() -> None:
    rng = random.Random(3)
    few, many = (
        statistics.median(standard_error([rng.gauss(0, 1) for _ in range(pairs)]) for _ in range(200))
        for pairs in (5, 20)
    )
    assert many == pytest.approx(1 / math.sqrt(20), rel=0.15)
    assert few > 1.5 * many


@pytest.mark.parametrize("metric", Metric)
def test_a_drop_and_its_logarithm_are_the_same_thing(metric: Metric) -> None:
    assert drop_of(log_of(0.03, metric), metric) == pytest.approx(0.03)
    worse = 0.97 if metric.more_is_better else 1.03
    sign = -1 if metric.more_is_better else 1
    assert drop_of(sign * math.log(worse), metric) == pytest.approx(0.03)


def test_mann_whitney_agrees_with_counting() -> None:
    rng = np.random.default_rng(1)
    assert mann_whitney(rng.normal(size=300), rng.normal(size=300) + 1) < 1e-6
    assert mann_whitney(rng.normal(size=300) + 1, rng.normal(size=300)) > 0.999


# -- a run's steps to one figure


def test_a_rare_stall_does_not_move_the_figure() -> None:
    times = np.full(200, 10.0)
    stalled = times.copy()
    stalled[[17, 90, 150]] = 1000.0
    assert usual_cost(stalled) == pytest.approx(usual_cost(times))


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
def test_a_loader_that_delivers_in_bursts_is_seen_to_grow_slower(workers: int) -> None:
    times = np.full(240, 10.0)
    times[::workers] = 100.0
    slower = times.copy()
    slower[::workers] = 110.0
    share = 100 / workers / (100 / workers + 10 * (workers - 1) / workers)
    assert usual_cost(slower) / usual_cost(times) - 1 == pytest.approx(0.1 * share, rel=0.01)


def test_the_warm_up_ends_where_the_steps_become_alike() -> None:
    rng = np.random.default_rng(2)
    times = np.exp(rng.normal(0, 0.05, 200))
    times[:35] *= np.linspace(4, 1.3, 35)
    never = np.zeros(200, dtype=bool)
    assert 30 <= find_warmup(times, never) <= 60
    assert find_warmup(np.ones(200), never) == 1


def test_a_late_compilation_belongs_to_the_warm_up() -> None:
    compiled = np.zeros(200, dtype=bool)
    compiled[[0, 60]] = True
    assert find_warmup(np.ones(200), compiled) == 61


def test_a_single_long_step_is_no_warm_up() -> None:
    times = np.exp(np.random.default_rng(3).normal(0, 0.05, 200))
    times[70] = 50.0
    assert find_warmup(times, np.zeros(200, dtype=bool)) <= 10


def test_a_run_of_few_steps_is_no_error() -> None:
    for steps in range(12):
        assert 0 <= find_warmup(np.ones(steps), np.zeros(steps, dtype=bool)) <= max(1, steps)
