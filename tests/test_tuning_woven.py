"""Trials where epochs are short: both states in every place of an epoch, and over soon."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from diagnose.tuner.woven import MOST_PIECES, Uneven, lengths
from tests.simulated_job import MS, Change, Machine, controller

EPOCH = 64
Shape = Callable[[int], float]

SHAPES: dict[str, Shape] = {
    "alike": lambda place: 1.0,
    "slow beginnings": lambda place: 2.0 if place < 8 else 1.0,
    "sorted by length": lambda place: 0.6 + 0.8 * place / EPOCH,
    "every seventh": lambda place: 1.3 if place % 7 < 3 else 1.0,
}


def tried(
    seed: int = 0,
    *,
    factor: float = 1.0,
    shape: Shape = SHAPES["alike"],
    touches: str = "model",
    epoch: Callable[[int], int] = lambda number: EPOCH,
    aside: Callable[[int], bool] = lambda step: False,
    steps: int = 4000,
    spread: float = 0.03,
    unknown: bool = False,
    base_ms: int = 20,
) -> tuple[dict[str, Any], Change, Machine]:
    """The trial of a change that makes steps take `factor` times as long, in epochs of these lengths; the
    machine's `steps` are those that it was in force in."""
    machine = Machine(seed=seed, spread=spread, memory=1.5 * spread, base_ns=base_ms * MS)
    change = Change(machine, "change", factor=factor, touches=touches)
    control = controller(machine, [change])
    job = control._world.job
    number, place, job.epoch_steps = 0, 0, 0 if unknown else epoch(0)
    machine.steps = 0
    for step in range(1, steps + 1):
        machine.steps += bool(machine.factors)
        took = machine.step_ns() * shape(place) * (10 if aside(step) else 1)
        machine.now += int(took) + (20 * MS if place == 0 else 0)
        control.boundary(step, aside=aside(step), begins=place == 0)
        if machine.trials():
            break
        place += 1
        if place == epoch(number):
            job.epoch_steps, number, place = place, number + 1, 0
    return machine.trials()[0], change, machine


@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_without_effect_is_not_kept_whatever_an_epoch_looks_like(shape: str) -> None:
    trials = [tried(seed, shape=SHAPES[shape])[0] for seed in range(20)]
    assert {trial["outcome"] for trial in trials} <= {"reverted", "cannot_tell"}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gain_is_found_in_a_third_of_the_steps_that_whole_epochs_take(shape: str) -> None:
    spent = {}
    for touches in ("model", "nothing"):
        trials = [tried(s, factor=0.88, shape=SHAPES[shape], touches=touches)[0] for s in range(8)]
        assert {trial["outcome"] for trial in trials} == {"kept"}
        speedup = statistics.fmean(trial["measured"]["speedup"] for trial in trials)
        assert speedup == pytest.approx(1 / 0.88, rel=0.03)
        spent[touches] = statistics.fmean(trial["steps_spent"] for trial in trials)
    assert spent["model"] < 0.5 * spent["nothing"]


def test_epochs_of_other_lengths_are_measured_as_before() -> None:
    trial, *_ = tried(factor=0.8, epoch=lambda number: 40 + 7 * (number % 3))
    assert trial["outcome"] == "kept"


def test_steps_that_also_do_something_else_count_in_neither_state() -> None:
    trial, *_ = tried(factor=0.88, aside=lambda step: step % 50 == 0)
    assert trial["outcome"] == "kept"
    assert trial["measured"]["speedup"] == pytest.approx(1 / 0.88, rel=0.06)


def test_a_change_that_is_far_slower_is_out_before_the_first_epoch_is() -> None:
    trial, _, machine = tried(factor=4.0)
    assert trial["outcome"] == "reverted"
    assert not machine.factors
    assert machine.steps == EPOCH // MOST_PIECES, "one piece of an epoch"


@pytest.mark.parametrize(
    ("places", "least", "wanted"),
    [(63, 5, [7, 8, 8, 8, 8, 8, 8, 8]), (19, 5, [9, 10]), (11, 5, []), (99, 40, [49, 50])],
)
def test_an_epoch_is_cut_into_an_even_number_of_pieces(places: int, least: int, wanted: list[int]) -> None:
    if not wanted:
        with pytest.raises(Uneven):
            lengths(places, 1, least)
        return
    cut = lengths(places, 1, least)
    assert sorted(cut) == wanted
    assert sum(cut) == places and len(cut) <= MOST_PIECES


def test_a_trial_that_begins_in_the_first_epoch_is_woven_from_its_end_on() -> None:
    """Until then nobody knows how long epochs are, and windows lie anywhere."""
    spent = {}
    for unknown in (False, True):
        trials = [tried(seed, factor=0.9, base_ms=200, unknown=unknown)[0] for seed in range(10)]
        assert {trial["outcome"] for trial in trials} == {"kept"}
        assert all(trial["first_step"] < EPOCH for trial in trials)
        spent[unknown] = statistics.fmean(trial["steps_spent"] for trial in trials)
    assert spent[False] < spent[True] < spent[False] + 2 * EPOCH
