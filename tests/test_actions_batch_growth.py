"""Several of a script's batches as one, from a live loader: samples, rate, schedule and clock."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from diagnose.actions._learning_rate import RAMP_STEPS
from diagnose.actions.base import NotYet
from diagnose.actions.batch_growth import BatchGrowth
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.core import job as jobs
from diagnose.core.trial import Safety
from diagnose.tuner.policy import Policy
from tests.fakes import measured
from tests.loops import Rows, Switch, begin
from tests.running import DIAGNOSE, run, write
from tests.simulated_job import Change, Machine, controller

Job = functools.partial(jobs.Job, epochs_ended=1)
Make = Callable[[], "DataLoader[Any]"]
LOADERS: dict[str, Make] = {
    "shuffle": lambda: DataLoader(Rows(), 4, shuffle=True),
    "generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "drop last": lambda: DataLoader(Rows(), 4, shuffle=True, drop_last=True),
    "distributed": lambda: DataLoader(
        Rows(74), 4, sampler=DistributedSampler(Rows(74), num_replicas=2, rank=1, seed=5)
    ),
    "weighted": lambda: DataLoader(
        Rows(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 38.0).tolist(), 40)
    ),
    "two workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2, persistent_workers=True),
}


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 1e-5)


def epochs(
    loader: DataLoader[Any],
    num: int,
    plan: dict[int, Callable[[Switch], None]],
    *,
    step: Callable[[torch.Tensor], None] | None = None,
    job: jobs.Job | None = None,
    action: BatchGrowth | None = None,
) -> Iterator[list[list[int]]]:
    """Trains on a loader; yields the samples of each batch, epoch by epoch.

    Args:
        loader: The loader.
        num: How many epochs.
        plan: What to do before a step, by its number.
        step: Trains on a batch.
        job: The job, with its optimizers.
        action: The action.
    """
    model, optimizer = a_model()
    job = job or Job(models=[model], optimizers=[optimizer])
    switch, number = None, 0
    try:
        for _ in range(num):
            seen = []
            batches = begin(job, loader)
            switch = switch or Switch(action or BatchGrowth(), job)
            while True:
                if number in plan:
                    plan[number](switch)
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                if step is None:
                    model(batch[:, :2]).sum().backward()
                    job.optimizers[0].step()
                    job.optimizers[0].zero_grad()
                else:
                    step(batch)
                for ended in list(job.on_step):
                    ended()
                seen.append([int(row[0]) for row in batch])
                number += 1
            del batches
            yield seen
    finally:
        if switch is not None:
            switch.close()


def on(value: int) -> Callable[[Switch], None]:
    return lambda switch: switch.on(value)


def off(switch: Switch) -> None:
    switch.off()


def flat(epoch: list[list[int]]) -> list[int]:
    return [index for batch in epoch for index in batch]


@pytest.mark.parametrize("kind", LOADERS)
def test_each_sample_comes_once_an_epoch_in_the_scripts_order(kind):
    """Grown in the middle of an epoch, taken back in the middle of the third, and put in again."""
    orders = []
    plans = ({}, {3: on(2), 14: off, 16: on(2)})
    for plan in plans:
        torch.manual_seed(7)
        # The first index of an epoch may draw from the process's generator, and nothing else does.
        orders.append(list(epochs(LOADERS[kind](), 4, plan)))
    plain, grown = orders
    assert [flat(epoch) for epoch in grown] == [flat(epoch) for epoch in plain]
    assert max(len(batch) for epoch in grown for batch in epoch) == 8
    assert len(grown[1]) < len(plain[1])


def counting(job: jobs.Job) -> None:
    batches = begin(job, DataLoader(Rows(80), 4))
    for _ in range(20):
        next(batches)


def looping(job: jobs.Job) -> None:
    list(begin(job, DataLoader(Rows(80), 4)))


@pytest.mark.parametrize("loop, grows", [(counting, False), (looping, True)])
def test_a_loop_that_may_count_its_batches_gets_as_many_as_it_counts(loop, grows):
    model, optimizer = a_model()
    with measured(perf_counter_ns) as recorder:
        job = jobs.Job(models=[model], optimizers=[optimizer])
        loop(job)
        job.epochs_ended = recorder.feed.epochs_ended
        job.iterators.clear()
        job.loaders.clear()
        batches = begin(job, DataLoader(Rows(80), 4))
        if grows:
            BatchGrowth().check(job)
        else:
            with pytest.raises(NotYet, match="it may count"):
                BatchGrowth().check(job)
    del batches


def test_an_evaluation_s_end_is_no_epoch_s():
    with measured(perf_counter_ns) as recorder, torch.no_grad():
        list(DataLoader(Rows(8), 4))
    assert recorder.feed.epochs_ended == 0


def test_without_workers_the_very_next_batch_is_larger_and_the_last_has_what_is_left():
    (sizes,) = ([len(batch) for batch in epoch] for epoch in epochs(DataLoader(Rows(38), 4), 1, {2: on(2)}))
    assert sizes == [4, 4, 8, 8, 8, 6]
    (sizes,) = ([len(batch) for batch in epoch] for epoch in epochs(DataLoader(Rows(66), 4), 1, {1: on(4)}))
    assert sizes == [4, 16, 16, 16, 14]


def test_with_workers_what_they_have_made_comes_first_and_each_step_knows_its_batch():
    action, known, sizes = BatchGrowth(), [], []
    model, optimizer = a_model()
    job = Job(models=[model], optimizers=[optimizer])
    grown: list[Any] = []

    def put_in(switch: Switch) -> None:
        switch.on(2)
        grown.append(switch.prepare(2)[1])

    def step(batch: torch.Tensor) -> None:
        known.append(grown[0].parts() if grown else 1)
        sizes.append(len(batch))

    plan = {2: put_in, 9: off, 12: on(2)}
    loader = DataLoader(Rows(80), 4, num_workers=2)
    list(epochs(loader, 2, plan, step=step, job=job, action=action))
    # Two workers have two batches ready each; one is handed out before another index is drawn.
    assert sizes[:9] == [4, 4, 4, 4, 4, 4, 8, 8, 8]
    assert known[:9] == [size / 4 for size in sizes[:9]]
    assert known[13:] == [size / 4 for size in sizes[13:]]
    assert action.settle_steps == 5


def test_a_loader_whose_batches_our_workers_make_grows_too():
    orders = []
    for tried in (False, True):
        torch.manual_seed(7)
        loader, seen = DataLoader(Rows(80), 4, shuffle=True), []
        model, optimizer = a_model()
        job = Job(models=[model], optimizers=[optimizer])
        for _ in range(2):
            batches = begin(job, loader)
            if tried and not seen:
                workers = Switch(LoaderWorkers(), job)
            epoch = []
            for number in range(100):
                if tried and not seen and number == 2:
                    workers.on(1)
                if tried and not seen and number == 4:
                    growth = Switch(BatchGrowth(), job)
                    growth.on(2)
                try:
                    epoch.append([int(row[0]) for row in next(batches)])
                except StopIteration:
                    break
            seen.append(epoch)
            del batches
        if tried:
            growth.close()
            workers.close()
        orders.append(seen)
    assert [flat(epoch) for epoch in orders[1]] == [flat(epoch) for epoch in orders[0]]
    assert max(map(len, orders[1][0])) == 8 and len(orders[1][1]) == 10


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), torch.optim.AdamW])
@pytest.mark.parametrize("size", [2, 4])
def test_it_trains_as_a_loop_over_larger_batches_with_the_rates_rule(make, size):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(70, 2, generator=generator), torch.randn(70, 1, generator=generator))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model, twin = a_model()[0], a_model()[0]
    optimizer, plainly = make(model.parameters()), make(twin.parameters())
    job, action = Job(models=[model], optimizers=[optimizer]), BatchGrowth()
    loader = DataLoader(data, 4)
    batches = begin(job, loader)
    with action.prepare(job, size) as ready, action.apply(job, ready):
        for epoch in range(2):
            for batch in batches if not epoch else begin(job, loader):
                train(model, optimizer, batch)
                for ended in list(job.on_step):
                    ended()
    rate = plainly.param_groups[0]["lr"]
    for taken, batch in enumerate([*DataLoader(data, 4 * size), *DataLoader(data, 4 * size)], 1):
        parts = math.ceil(len(batch[0]) / 4)
        full = parts if isinstance(plainly, torch.optim.SGD) else math.sqrt(parts)
        plainly.param_groups[0]["lr"] = rate * (1 + (full - 1) * min(1.0, taken / RAMP_STEPS))
        train(twin, plainly, batch)
    assert optimizer.param_groups[0]["lr"] == rate
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-7)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=61),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 60),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_goes_by_steps_ends_where_it_would_have(kind):
    ends = []
    for plan in ({}, {5: on(4)}):
        model, optimizer = a_model()
        schedule = SCHEDULES[kind](optimizer)
        job = Job(models=[model], optimizers=[optimizer])

        def step(batch: torch.Tensor, optimizer: Any = optimizer, schedule: Any = schedule) -> None:
            optimizer.step()
            schedule.step()

        list(epochs(DataLoader(Rows(80), 4), 3, plan, step=step, job=job))
        ends.append((schedule.last_epoch, optimizer.param_groups[0]["lr"]))
    assert ends[0] == ends[1]
    assert ends[0][0] == 60


@pytest.mark.parametrize("time, outcome", [(1.4, "kept"), (2.3, "reverted")])
def test_steps_of_more_samples_are_compared_by_the_time_per_sample(time, outcome):
    machine = Machine()
    growth = Change(machine, "growth", factor=time, safety=Safety.TRAINING)
    growth.resizes = True  # type: ignore[misc]
    policy = Policy(only=frozenset({"growth"}), allowed=frozenset({Safety.TRAINING}))
    control = controller(machine, [growth], [], policy=policy)
    for _ in range(1500):
        machine.now += machine.step_ns()
        machine.steps += 1
        control.boundary(machine.steps, aside=False, num_samples=8 if "growth" in machine.factors else 4)
    assert machine.outcomes() == {"growth": outcome}
    if outcome == "kept":
        assert machine.trials()[0]["measured"]["speedup"] == pytest.approx(2 / time, rel=0.1)


SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
data = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randint(2, (512,)), torch.arange(512))
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
steps, whole = 0, True
for epoch in range(int(sys.argv[1])):
    seen = []
    for rows, labels, numbers in loader:
        loss = nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        seen += numbers.tolist()
    whole = whole and sorted(seen) == list(range(512))
print(whole, steps < 128 * epoch)
"""


@pytest.mark.extended
@pytest.mark.alone
def test_a_run_that_names_it_keeps_it_and_every_epoch_is_whole(tmp_path):
    write(tmp_path / "job.py", SCRIPT)
    options = ("--tune", "--allow", "training", "--only", "batch-growth", "--json", "report.json")
    ended = run(*DIAGNOSE, *options, "job.py", "30", cwd=tmp_path)
    assert ended.stdout == "True True\n", ended.stderr
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (trial,) = found["trials"]
    assert (trial["action"], trial["state"]) == ("batch-growth", "kept"), trial
    assert trial["measured_speedup"] > 1.2
    assert "without a way back" not in trial["reason"]
