"""Whether a stream that the training thread reads yields the same samples in each epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from diagnose.hooks.repeated_samples import TIMES
from diagnose.rules._engine import diagnosed
from diagnose.rules._serial_examples import loading, prepared
from tests.fakes import FakeClock, measured

HOOKS = ("dataloader", "loader-facts", "repeated-samples")


class Lines(IterableDataset[Any]):
    """Rows of numbers, one after the other.

    Args:
        num_rows: How many.
        dice: Shuffles them, if given.
        by_torch: Whether torch's generator does.
    """

    def __init__(
        self, num_rows: int = 12, dice: random.Random | None = None, by_torch: bool = False
    ) -> None:
        self.num_rows, self.dice, self.by_torch = num_rows, dice, by_torch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(self.num_rows))
        if self.dice is not None:
            self.dice.shuffle(order)
        if self.by_torch:
            order = torch.randperm(self.num_rows).tolist()
        for row in order:
            yield torch.full((4,), float(row))


class Going(Lines):
    """Goes on in each epoch where the one before has ended."""

    begun = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.begun += self.num_rows
        for row in range(self.begun, self.begun + self.num_rows):
            yield torch.full((4,), float(row))


def sightings(dataset: Dataset[Any], epochs: int, **loader: Any) -> list[list[int]]:
    with measured(FakeClock(), *HOOKS) as recorder:
        batches = DataLoader(dataset, **{"batch_size": 4, **loader})
        for _ in range(epochs):
            for _ in batches:
                pass
        assert not recorder.notes
        seen: list[list[int]] = recorder.facts.get("own_sightings", [])
        return seen


def sums_of(seen: list[list[int]]) -> dict[int, list[int]]:
    return {index: [sum_ for _, i, sum_ in seen if i == index] for _, index, _ in seen}


def test_the_first_samples_of_a_stream_are_seen_again_in_later_epochs():
    sums = sums_of(sightings(Lines(), 6))
    assert sums.keys() == {0, 1, 2, 3}
    assert {len(each) for each in sums.values()} == {TIMES}, "then they are known"
    assert all(len(set(each)) == 1 for each in sums.values())


@pytest.mark.parametrize("stream", [Lines(dice=random.Random(3)), Going()])
def test_a_stream_that_is_shuffled_or_goes_on_comes_out_differently(stream: Lines):
    sums = sums_of(sightings(stream, 2))
    assert any(len(set(each)) > 1 for each in sums.values())


def test_of_a_stream_that_draws_from_the_generators_nobody_says_that_it_is_the_same():
    assert sightings(Lines(by_torch=True), 3) == []


def test_one_epoch_of_a_stream_shows_each_sample_once_and_so_does_a_short_one():
    assert len(sightings(Lines(num_rows=400), 1)) == 4
    assert len(sightings(Lines(num_rows=2), 3)) == 2, "not in every epoch"
    assert sightings(Lines(), 3, batch_size=None) == [], "samples that are handed out one by one"


def test_batches_of_a_stream_are_the_same_whether_it_is_watched_or_not():
    alone = [row.clone() for _ in range(3) for row in DataLoader(Lines(10), batch_size=4)]
    with measured(FakeClock(), *HOOKS):
        watched = [row.clone() for _ in range(3) for row in DataLoader(Lines(10), batch_size=4)]
    assert len(alone) == len(watched) == 9
    assert all(map(torch.equal, alone, watched))


@pytest.mark.parametrize(
    ("varied", "epochs", "name"),
    [(0, 5, "repeated-preparation"), (1, 5, "serial-loading"), (0, 1, "serial-loading")],
)
def test_a_stream_that_is_prepared_anew_is_no_reason_to_divide_it(varied: int, epochs: int, name: str):
    run = loading(40, own=prepared(varied=varied), loader={"iterable": True, "epochs": epochs})
    (finding,) = diagnosed(run).findings
    assert finding.rule == name
    assert not finding.actions, "no worker can read a part of it as it is"


class Spans(Dataset[Any]):
    """Rows that are asked for by where they begin and end."""

    def __getitem__(self, span: np.ndarray) -> torch.Tensor:
        return torch.arange(span[0], span[1]).float()


def test_of_samples_that_are_asked_for_by_arrays_nothing_is_said_and_nothing_fails():
    spans = [[np.array([first, first + 4]) for first in range(start, start + 4)] for start in (0, 4, 8)]
    assert sightings(Spans(), 3, batch_size=1, batch_sampler=spans) == []
