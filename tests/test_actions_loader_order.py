"""Switching who makes the batches changes neither their order nor any random number of the script's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, Sampler, WeightedRandomSampler

from diagnose.actions.base import Action, CannotApply
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.core.job import Job
from tests.loops import Noisy, Plan, Rows, Switch, begin, children_end, close, equal, loop, off, on
from tests.mixing import mixed

Make = Callable[[], "DataLoader[Any]"]


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's own, with a random generator of its own."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_rows // 2

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        order = torch.randperm(self.num_rows, generator=generator).tolist()
        for first in range(0, self.num_rows - 1, 2):
            yield order[first : first + 2]


class DrawsAtTheEnd(Sampler[int]):
    """Draws from the process's generator when it begins and when it ends."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.num_rows).tolist()
        torch.rand(1)


KINDS: dict[str, Make] = {
    "shuffle": lambda: DataLoader(Rows(), 4, shuffle=True),
    "generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "distributed": lambda: DataLoader(
        Rows(), 2, sampler=DistributedSampler(Rows(), num_replicas=2, rank=1, seed=5)
    ),
    "batch sampler": lambda: DataLoader(Rows(), batch_sampler=Pairs(37)),
    "no batches": lambda: DataLoader(Rows(21), batch_size=None, shuffle=True),
    "weighted": lambda: DataLoader(
        Rows(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 38.0).tolist(), 40)
    ),
    "two workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "two workers, generator": lambda: DataLoader(
        Rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=2
    ),
    "draws at the end": lambda: DataLoader(Rows(), 4, sampler=DrawsAtTheEnd(37), drop_last=True),
}

LAST = 9
"""Batches before the last one of an epoch, of most kinds."""

PLANS: dict[str, Plan] = {
    "more, none, more": {3: on(3), 5: off, 9: on(1), 14: off, 16: on(3)},
    "at both ends": {0: on(1), 1: on(3), LAST: off, LAST + 1: on(3), LAST + 2: off, LAST + 3: on(1)},
    "out at once": {2: on(3), 4: close, 5: on(1), 6: close, 13: on(3)},
    "to the end": {1: on(3)},
}


@pytest.mark.parametrize("make, plan", mixed(KINDS, PLANS))
def test_order_and_random_numbers_are_those_of_the_loop_left_alone(make: Make, plan: Plan) -> None:
    assert equal(loop(make, LoaderWorkers(), plan), loop(make))
    assert children_end()


EARLY = ("generator", "draws at the end", "two workers", "two workers, generator", "persistent")


@pytest.mark.parametrize(
    "make, stop_at", mixed({kind: KINDS[kind] for kind in EARLY}, {"at 7": 7, "at 9": 9})
)
@pytest.mark.extended
def test_a_loop_that_leaves_each_epoch_early_sees_the_same(make: Make, stop_at: int) -> None:
    plan = {1: on(3), 12: off, 15: on(1)}
    assert equal(
        loop(make, LoaderWorkers(), plan, epochs=4, stop_at=stop_at), loop(make, epochs=4, stop_at=stop_at)
    )
    assert children_end()


def test_the_seed_that_a_sampler_draws_with_its_first_batch_stays_drawn() -> None:
    """Whoever saves the generator before he starts workers, and restores it then, rewinds this draw."""
    states = []
    for switched in (True, False):
        torch.manual_seed(7)
        job = Job()
        batches = begin(job, KINDS["shuffle"]())
        switch = Switch(LoaderWorkers(), job)
        before = torch.get_rng_state()
        if switched:
            switch.on(2)
        assert torch.equal(torch.get_rng_state(), before), "nothing is drawn before the loop asks"
        next(batches)
        states.append(torch.get_rng_state())
        assert not torch.equal(states[-1], before)
        switch.close()
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", ["shuffle", "generator", "two workers", "persistent"])
def test_each_epoch_draws_its_base_seed_as_it_did(kind: str) -> None:
    """Workers that outlive an epoch draw none; the script's own iterator must."""
    states = []
    for switched in (True, False):
        torch.manual_seed(7)
        job, loader = Job(), KINDS[kind]()
        switch = Switch(LoaderWorkers(), job)
        batches = begin(job, loader)
        if switched:
            switch.on(1)
        list(batches)
        del batches
        begin(job, loader)
        states.append((loader.generator or torch.default_generator).get_state())
        switch.close()
    assert torch.equal(*states)


WITH_WORKERS = ("two workers", "two workers, generator", "persistent")


@pytest.mark.parametrize("make, plan", mixed({kind: KINDS[kind] for kind in WITH_WORKERS}, PLANS))
def test_a_deeper_queue_changes_nothing_else(make: Make, plan: Plan) -> None:
    deeper = {step: on(4) if change not in (off, close) else change for step, change in plan.items()}
    assert equal(loop(make, LoaderPrefetch(), deeper), loop(make))
    assert equal(loop(make, LoaderPrefetch(), deeper, stop_at=6), loop(make, stop_at=6))
    assert children_end()


class Memory(Rows):
    made = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        return super().__getitem__(index) + self.made


@pytest.mark.parametrize("rows", [Noisy, Memory])
def test_no_deeper_queue_lets_workers_that_stay_make_other_samples(rows: type[Rows]) -> None:
    """After an epoch that is left early they go on from where the queue has brought them."""
    job = Job()
    loader = DataLoader(rows(), 4, num_workers=1, persistent_workers=True)
    begin(job, loader)
    with pytest.raises(CannotApply, match="depend on what their worker has made before"):
        LoaderPrefetch().check(job)
    job.iterators.clear()
    loader._iterator = None  # torch keeps it otherwise
    assert children_end()
    make = lambda: DataLoader(rows(), 4, num_workers=1)  # noqa: E731
    assert equal(loop(make, LoaderPrefetch(), {1: on(4)}, stop_at=3), loop(make, stop_at=3))


SHAPES = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([None, 1, 3, 4]),
        "shuffle": st.booleans(),
        "num_workers": st.sampled_from([0, 0, 1, 2]),
        "drop_last": st.booleans(),
        "persistent_workers": st.booleans(),
        "own_generator": st.booleans(),
    }
)
CHANGES = st.sampled_from([off, close, on(1), on(2), on(3)])


@given(
    shape=SHAPES,
    num_rows=st.integers(1, 17),
    plan=st.dictionaries(st.integers(0, 40), CHANGES, max_size=8),
    epochs=st.integers(1, 3),
    stop_at=st.sampled_from([-1, -1, 2, 5]),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_loader_under_any_plan_yields_what_it_does_alone(
    shape: dict[str, Any], num_rows: int, plan: dict[int, Any], epochs: int, stop_at: int
) -> None:
    options = dict(shape)
    own_generator = options.pop("own_generator")
    options["persistent_workers"] &= options["num_workers"] > 0
    # A loader that would have no batch at all is refused.
    options["drop_last"] &= options["batch_size"] is not None and num_rows >= options["batch_size"]

    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return DataLoader(Rows(num_rows), generator=generator, **options)

    action: Action = LoaderWorkers()
    assert equal(
        loop(make, action, plan, epochs=epochs, stop_at=stop_at),
        loop(make, epochs=epochs, stop_at=stop_at),
    )
