"""What single steps show that their mean hides: spikes, their period, drift."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from diagnose.analysis.series import find_drift, find_period, summarize_series
from diagnose.core.phases import Phase
from diagnose.core.series import Series

MS = 1e6
Vector = npt.NDArray[np.float64]


def noisy(count: int, mean_ms: float = 10.0, spread: float = 0.05, seed: int = 0) -> Vector:
    """Steps of about this time."""
    times: Vector = mean_ms * MS * (1 + spread * np.random.default_rng(seed).standard_normal(count))
    return times


def series_of(**phases: Vector) -> Series:
    return summarize_series({Phase(name): times for name, times in phases.items()})


def test_steps_that_are_all_alike_have_no_spikes_and_no_drift():
    series = series_of(forward=noisy(400), backward=noisy(400, seed=1))
    assert series.spike_ns == {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    assert series.period == {}
    assert series.drift_ns == {Phase.FORWARD: 0, Phase.BACKWARD: 0}


def test_a_checkpoint_every_twenty_steps_has_a_period_and_a_size():
    checkpoint = np.zeros(400)
    checkpoint[19::20] = 300 * MS
    series = series_of(forward=noisy(400), checkpoint=checkpoint)
    assert series.period == {Phase.CHECKPOINT: 20}
    assert series.spike_share[Phase.CHECKPOINT] == 0.05
    assert series.each_ns(Phase.CHECKPOINT) == pytest.approx(300 * MS)
    assert series.each_ns(Phase.FORWARD) is None


def test_a_phase_that_a_usual_step_lacks_counts_although_it_is_shorter_than_a_step():
    checkpoint = np.zeros(400)
    checkpoint[9::10] = 2 * MS
    assert series_of(forward=noisy(400), checkpoint=checkpoint).period == {Phase.CHECKPOINT: 10}


def test_spikes_at_random_have_no_period():
    forward = noisy(1000)
    forward[np.random.default_rng(3).choice(1000, 20, replace=False)] += 50 * MS
    series = series_of(forward=forward)
    assert series.spike_ns[Phase.FORWARD] == pytest.approx(MS, rel=0.05)
    assert series.period == {}


def test_neighbouring_spikes_count_once():
    assert find_period(np.array([10, 11, 30, 31, 50, 51])) == 20
    assert find_period(np.array([10, 30])) is None


def test_a_step_that_grows_drifts():
    times = noisy(400) + np.linspace(0, 8 * MS, 400)
    assert find_drift(times) == pytest.approx(6 * MS, rel=0.15)


def test_a_few_steps_do_not_drift():
    assert find_drift(np.linspace(0, 8 * MS, 39)) == 0


def test_a_step_that_slows_down_at_one_moment_does_not_drift():
    times = noisy(400)
    times[200:] *= 2
    assert find_drift(times) == 0


def test_what_slows_the_whole_step_down_is_no_drift():
    slower = np.linspace(1, 2, 200)
    assert find_drift(5 * MS * slower) > 3 * MS
    assert find_drift(5 * MS * slower, rest=10 * MS * slower) == 0
    assert find_drift(5 * MS * slower**3, rest=10 * MS * slower) > 3 * MS


def test_what_comes_and_goes_does_not_drift():
    """Sixteenths of a run that other programs slowed down more and more often."""
    levels = [
        35.3,
        35.6,
        39.8,
        39.2,
        39.9,
        40.7,
        43.0,
        51.9,
        45.2,
        46.5,
        54.1,
        41.1,
        42.8,
        52.4,
        49.4,
        52.1,
    ]
    assert find_drift(np.repeat(levels, 50) * MS) == 0
    assert find_drift(np.repeat(sorted(levels), 50) * MS) > 8 * MS


def test_drift_is_seen_where_many_steps_are_disturbed():
    times = np.linspace(2, 8, 200) * MS
    rng = np.random.default_rng(1)
    times[rng.random(200) < 0.4] += 20 * MS
    assert find_drift(times) > 3 * MS


def test_scatter_alone_hardly_ever_drifts():
    found = [find_drift(noisy(200, spread=0.3, seed=seed)) for seed in range(400)]
    assert sum(drift > 0 for drift in found) <= 2


def test_a_run_without_steps_has_no_series():
    assert summarize_series({}) == Series()


def test_what_every_fourth_step_gathers_may_grow():
    steps, data, saved = np.arange(400), Phase.DATA_WAIT, Phase.CHECKPOINT
    gathered, level = (np.where(steps % 4 == 0, 2e6 + slope * steps, 0.0) for slope in (4e4, 0.0))
    grown = summarize_series({data: gathered, Phase.FORWARD: np.full(400, 3e6)}).drift_ns
    # A quarter of the steps, from the middle of the first quarter of the run to that of the last.
    assert grown[data] == pytest.approx(4e4 * 300 / 4, rel=0.15)
    assert not summarize_series({data: level, Phase.FORWARD: gathered + 3e6}).drift_ns[data]
    assert not summarize_series({saved: gathered, Phase.FORWARD: level + 3e6}).drift_ns[saved]
