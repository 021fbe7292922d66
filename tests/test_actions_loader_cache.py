"""Samples kept in memory are the ones that the dataset would have made."""

from __future__ import annotations

import gc
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset, Subset

from diagnose.actions import _loader_samples, dataset_cache
from diagnose.actions._loader_samples import copied
from diagnose.actions.base import CannotApply, NotYet
from diagnose.actions.dataset_cache import DatasetCache
from diagnose.core.job import Job
from tests.loops import Log, Noisy, Plan, Rows, Switch, begin, close, equal, loop, off, on
from tests.test_actions_loader_checks import Caching, Records, as_they_are
from tests.toggled import assert_equal, tuned, weights


class SecondEpoch(DatasetCache):
    """As if an epoch had ended before."""

    def check(self, job: Job) -> None:
        job.facts["loaders"] = [{"epochs": 2}]
        super().check(job)


made = Log()


class Counted(Rows):
    """Rows that tell when they are made."""

    def __getitem__(self, index: int) -> torch.Tensor:
        made.say(index)
        return super().__getitem__(index)


turned = Log()


class Turning(Rows):
    """Rows that are others once something was said."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + turned._said.qsize()


class Padded(Rows):
    """Rows that are made by the batch: each as long as the longest."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.full((max(indices) + 1,), float(index)) for index in indices]


class Spoiling(Rows):
    """Rows whose `collate` hands them out themselves, and a loop that changes them in place."""


def of_first(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([one + other for one, other in samples])


def spoiled(samples: list[torch.Tensor]) -> torch.Tensor:
    for sample in samples:
        sample.add_(1)
    return samples[0]


MAKES: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Rows(), 4, shuffle=True),
    "a part": lambda: DataLoader(Subset(Rows(), range(3, 30)), 4, shuffle=True),
    "two of them": lambda: DataLoader(StackDataset(Rows(), Rows()), 4, shuffle=True, collate_fn=of_first),
    "no batches": lambda: DataLoader(Rows(5), None),
    "changed in place": lambda: DataLoader(Spoiling(), 4, shuffle=True, collate_fn=spoiled),
}
PLANS: dict[str, Plan] = {
    "on": {2: on(None)},
    "on and off": {2: on(None), 9: off, 16: on(None), 25: off, 31: on(None), 35: close},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_batches_are_those_of_the_loop_left_alone(make: Callable[[], DataLoader[Any]], plan: Plan) -> None:
    assert equal(loop(make, SecondEpoch(), plan, epochs=4), loop(make, epochs=4))


@pytest.mark.parametrize("whole", [True, False])
def test_each_sample_is_made_once_and_one_of_them_again_in_each_epoch(whole: bool) -> None:
    dataset = Counted(13)
    job, loader = Job(), DataLoader(dataset if whole else Subset(dataset, range(13)), 4, shuffle=True)
    batches = begin(job, loader)
    switch = Switch(SecondEpoch(), job)
    switch.on(None)
    made.heard()
    list(batches)
    assert sorted(made.heard()) == list(range(13))
    assert len(torch.cat(list(begin(job, loader)))) == 13
    assert len(made.heard()) == 1
    switch.off()
    list(begin(job, loader))
    assert len(made.heard()) == 13
    switch.close()
    assert begin(job, loader)._dataset_fetcher.dataset is loader.dataset


def test_it_settles_until_all_samples_are_known() -> None:
    job, loader = Job(), DataLoader(Rows(13), 4)
    batches = begin(job, loader)
    action = SecondEpoch()
    switch = Switch(action, job)
    switch.on(None)
    assert action.settle_steps == 4
    list(batches)
    begin(job, loader)
    assert action.settle_steps == 1
    switch.close()


def test_begun_in_the_middle_of_an_epoch_it_settles_until_a_whole_one_has_passed() -> None:
    """What is left of a shuffled epoch and the beginning of the next are not all samples."""
    job, loader = Job(), DataLoader(Counted(40), 4, shuffle=True)
    batches = begin(job, loader)
    for _ in range(5):
        next(batches)
    action = SecondEpoch()
    switch = Switch(action, job)
    switch.on(None)
    left = action.settle_steps
    while left:
        for _ in batches:
            left -= 1
            if not left:
                break
        else:
            batches = begin(job, loader)
    made.heard()
    list(begin(job, loader))
    assert len(made.heard()) == 1, "the one that is compared"
    switch.close()


def test_a_dataset_that_the_script_changes_is_read_anew() -> None:
    class Levels(Rows):
        level = 0

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, self.level])

    job, dataset = Job(), Levels(8)
    loader = DataLoader(dataset, 4)
    batches = begin(job, loader)
    switch = Switch(SecondEpoch(), job)
    switch.on(None)
    list(batches)
    dataset.level = 1
    batches = begin(job, loader)
    assert next(batches)[:, 1].tolist() == [1] * 4
    dataset.level = 2
    assert next(batches)[:, 1].tolist() == [2] * 4
    switch.close()


def test_a_rare_random_sample_ends_the_keeping() -> None:
    class Rare(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) + (torch.rand(1) if index == 30 else 0)

    make = lambda: DataLoader(Rare(), 4)  # noqa: E731
    assert equal(loop(make, SecondEpoch(), {2: on(None)}, epochs=3), loop(make, epochs=3))


Pair = namedtuple("Pair", "image label")


@pytest.mark.parametrize(
    "sample",
    [
        (torch.arange(4.0).reshape(2, 2).t(), 3),
        {"image": np.arange(6).reshape(2, 3), "text": "a"},
        Pair(torch.zeros(2), [1.5, None]),
    ],
)
def test_a_copy_is_of_the_same_kind_and_shares_no_memory(sample: Any) -> None:
    from diagnose.actions._loader_purity import same

    copy, num_bytes = copied(sample)
    assert same(copy, sample)
    assert num_bytes > 0
    first, original = (
        next(iter(each.values() if isinstance(each, dict) else each)) for each in (copy, sample)
    )
    first += 1
    assert not same(first, original)


def test_a_copy_lies_in_memory_as_the_sample_does() -> None:
    image = np.ones((2, 3, 4)).transpose(2, 0, 1)
    assert copied(image)[0].strides == image.strides
    tensor = torch.from_numpy(image)
    assert copied(tensor)[0].stride() == tensor.stride()


@pytest.mark.parametrize(
    "sample", [object(), [lambda: 1], torch.zeros(1, requires_grad=True), np.array([[]], object)]
)
def test_what_may_not_copy_well_is_not_kept(sample: Any) -> None:
    with pytest.raises(TypeError, match="of which no copy is known to be as good"):
        copied(sample)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Noisy(), 4), "samples are random"),
        (lambda: DataLoader(Caching(), 4, shuffle=True), "changes the dataset itself"),
        (lambda: DataLoader(Records(), 4, collate_fn=as_they_are), "the dataset's own memory"),
        (lambda: DataLoader(Rows(), 4, num_workers=1), "workers make the batches"),
        (lambda: DataLoader(Padded(), 4, shuffle=True), "makes samples by the batch"),
        (lambda: DataLoader(Subset(Padded(), range(9)), 4), "makes samples by the batch"),
        (lambda: DataLoader(Rows(1 << 60), 4), "all samples take"),
    ],
)
def test_what_cannot_be_kept_is_refused(make: Callable[[], DataLoader[Any]], reason: str) -> None:
    job = Job()
    begin(job, make())
    for action in (DatasetCache(), SecondEpoch()):
        with pytest.raises(CannotApply, match=reason) as refused:
            action.check(job)
        assert not isinstance(refused.value, NotYet), "no later epoch changes that"


def test_no_sample_is_kept_before_it_could_come_again() -> None:
    job = Job()
    begin(job, DataLoader(Rows(), 4))
    with pytest.raises(NotYet, match="in its first epoch"):
        DatasetCache().check(job)
    SecondEpoch().check(job)


def test_memory_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_cache, "available_bytes", lambda: 13 * 8 * 4)
    job, loader = Job(), DataLoader(Counted(13), 4)
    batches = begin(job, loader)
    switch = Switch(SecondEpoch(), job)
    switch.on(None)
    monkeypatch.undo()
    cache = switch.prepare(None)
    cache.samples._room = 5 * 8
    list(batches)
    made.heard()
    list(begin(job, loader))
    assert len(made.heard()) == 9, "five of thirteen had room, and one of these is compared"
    switch.close()


def looks_at_generators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an element for each look."""
    looks, look = [], _loader_samples.random_states
    monkeypatch.setattr(_loader_samples, "random_states", lambda: looks.append(1) or look())
    return looks


def test_while_nothing_is_handed_out_known_samples_cost_one_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_loader_samples, "COMPARE_SHARE", 1e-9)
    job, loader = Job(), DataLoader(Counted(40), 4, shuffle=True)
    switch, batches = Switch(SecondEpoch(), job), begin(job, loader)
    looks = looks_at_generators(monkeypatch)
    samples = switch.prepare(None).samples
    list(batches)
    assert len(looks) == 20, "before and after each batch of ten, not each sample of forty"
    looks.clear()
    copies: list[Any] = []
    monkeypatch.setattr(_loader_samples, "copied", copies.append)
    list(begin(job, loader))
    assert (len(looks), len(copies)) == (2, 0)
    assert samples.asked == 80
    switch.close()


@pytest.mark.parametrize("share", [1e-9, 1e9])
def test_while_nothing_is_handed_out_samples_are_compared_in_a_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The dataset turns random in the middle of an epoch, where nobody sees it."""
    monkeypatch.setattr(_loader_samples, "COMPARE_SHARE", share)
    turned.heard()
    job, loader = Job(), DataLoader(Turning(40), 4)
    switch, batches = Switch(SecondEpoch(), job), begin(job, loader)
    samples = switch.prepare(None).samples
    list(batches)
    for number, _ in enumerate(begin(job, loader)):
        if number == 4:
            turned.say(1)
    assert samples.refused == ("the dataset has made another sample of the same index" if share > 1 else "")
    switch.close()


def test_no_iterator_is_kept_alive() -> None:
    job, loader = Job(), DataLoader(Rows(), 4)
    begin(job, loader)
    switch = Switch(SecondEpoch(), job)
    switch.on(None)
    cache = switch.prepare(None)
    job.iterators.clear()
    job.loaders.clear()
    gc.collect()
    assert not cache._views
    switch.close()


def test_a_loop_under_the_hooks_ends_with_the_same_weights() -> None:
    def learn(action: SecondEpoch | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        with tuned(action):
            loader = DataLoader(Rows(), batch_size=4, shuffle=True)
            for _ in range(4):
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch).pow(2).mean().backward()
                    optimizer.step()
        return weights(model)

    assert_equal(learn(SecondEpoch()), learn(None))
