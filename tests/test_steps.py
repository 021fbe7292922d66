"""A training step is found in every kind of loop, without the user's help."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.fakes import SlowData, SlowModel, SlowOptimizer, steps_of
from tests.training_loops import BATCHES, batch, ended

pytest_plugins = ("tests.training_loops",)

# -- loops with a loader


def test_each_batch_of_a_plain_loop_is_a_step(recorder, clock, model, optimizer, loader):
    for rows in loader:
        optimizer.zero_grad()
        loss = model(rows).sum()
        clock.spend(3)
        loss.backward()
        optimizer.step()
        clock.spend(4)
    clock.spend(1000)
    steps = ended(recorder)
    times = {
        "data_wait": 2,
        "forward": 100,
        "gap_after_forward": 3,
        "backward": 200,
        "optimizer": 10,
        "gap_after_optimizer": 4,
    }
    assert [step.times for step in steps] == [times] * BATCHES, "and nothing of what follows the loop"
    assert [step.samples for step in steps] == [2] * BATCHES
    assert [step.backward_passes for step in steps] == [1] * BATCHES


def test_a_step_of_gradient_accumulation_is_one_optimizer_step(recorder, model, optimizer, loader):
    for index, rows in enumerate(loader):
        model(rows).sum().backward()
        if index % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [4, 4]
    assert [step.backward_passes for step in steps] == [2, 2]
    assert [step.times["data_wait"] for step in steps] == [4, 4]


def test_batches_fetched_ahead_for_accumulation_are_waited_for_in_training(
    recorder, clock, model, optimizer, loader
):
    batches = iter(loader)  # as Hugging Face's Trainer does, to know the number of tokens beforehand
    for _ in range(2):
        ahead = [next(batches), next(batches)]
        for rows in ahead:
            model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [4, 4]
    assert [step.times.get("data_wait") for step in steps] == [4, 4]
    assert not any("evaluation" in step.times for step in steps)


def test_a_loop_that_keeps_one_batch_in_hand_waits_for_data_not_for_evaluation(
    recorder, model, optimizer, loader
):
    batches = iter(loader)  # as Accelerate's loader does, to know which batch is the last
    upcoming: Any = next(batches)
    while upcoming is not None:
        rows, upcoming = upcoming, next(batches, None)
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.times.get("data_wait") for step in steps] == [4, 2, 2, None]
    assert not any("evaluation" in step.times for step in steps)


def test_batches_skipped_when_training_resumes_are_waited_for(recorder, model, optimizer, loader):
    for index, rows in enumerate(loader):
        if index < 2:
            continue
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.times.get("data_wait") for step in steps] == [6, 2]
    assert not any("evaluation" in step.times for step in steps)


def test_the_end_of_an_epoch_is_no_step_of_its_own(recorder, model, optimizer, loader):
    for _ in range(3):
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
    assert [step.samples for step in ended(recorder)] == [2] * BATCHES * 3


def test_what_follows_the_last_batch_of_an_epoch_belongs_to_the_next_step(
    recorder, clock, model, optimizer, loader
):
    for _ in range(2):
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
        clock.spend(50)  # the StopIteration has ended the step
    steps = ended(recorder)
    whole = [sum(step.times.values()) for step in steps]
    assert whole == [312, 312, 312, 312, 362, 312, 312, 312]


def test_two_optimizers_in_one_batch_are_one_step(recorder, clock, loader):
    generator, critic = SlowModel(clock, 100, 200), SlowModel(clock, 30, 40)
    for_generator, for_critic = SlowOptimizer(clock, generator, 10), SlowOptimizer(clock, critic, 5)
    for rows in loader:
        (critic(rows).sum() - critic(torch.randn(2, 4)).sum()).backward()
        for_critic.step()
        critic(generator(batch()).expand(2, 4)).sum().backward()
        for_generator.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * BATCHES
    assert {step.times["optimizer"] for step in steps} == {15}
    assert {step.times["forward"] for step in steps} == {30 + 30 + 100 + 30}


def test_an_optimizer_that_steps_for_each_of_its_groups_makes_one_step_of_a_batch(
    recorder, model, optimizer, loader
):
    """As DeepSpeed's does."""
    for rows in loader:
        model(rows).sum().backward()
        for _ in range(3):
            optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * BATCHES
    assert [step.times["optimizer"] for step in steps] == [30] * BATCHES


def test_a_critic_that_trains_more_often_makes_a_step_of_each_of_its_batches(recorder, clock, loader):
    generator, critic = SlowModel(clock), SlowModel(clock)
    for_generator, for_critic = SlowOptimizer(clock, generator, 10), SlowOptimizer(clock, critic, 5)
    batches = iter(loader)
    for _ in range(2):
        for _ in range(2):
            critic(next(batches)).sum().backward()
            for_critic.step()
        generator(batch()).sum().backward()
        for_generator.step()
    assert [step.times["optimizer"] for step in ended(recorder)] == [5, 15, 5, 15]


def test_a_batch_of_two_loaders_is_one_step(recorder, clock, model, optimizer, loader):
    unlabelled = DataLoader(SlowData(clock, num_rows=6 * BATCHES, fetch_ns=1), batch_size=6)
    for rows, more in zip(loader, unlabelled, strict=True):
        (model(rows).sum() + model(more).sum()).backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [8] * BATCHES
    assert [step.times["data_wait"] for step in steps] == [8] * BATCHES


def test_an_iterable_dataset_makes_steps_like_any_other(recorder, clock, model, optimizer):
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(6):
                clock.spend(7)
                yield torch.ones(4)

    for rows in DataLoader(Stream(), batch_size=2):
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2, 2, 2]
    assert [step.times["data_wait"] for step in steps] == [14, 14, 14]


def test_one_batch_trained_on_many_times_makes_many_steps(recorder, clock, model, optimizer, loader):
    rows = next(iter(loader))
    for _ in range(5):
        model(rows).sum().backward()
        clock.spend(1)
        optimizer.step()
        clock.spend(6)
    steps = ended(recorder)
    assert [sum(step.times.values()) for step in steps] == [2 + 311 + 6, 317, 317, 317, 311]
    assert [step.samples for step in steps] == [2] * 5


# -- closures


@pytest.mark.parametrize("with_loader", [True, False])
def test_a_closure_that_lbfgs_calls_often_is_part_of_one_step(recorder, clock, model, loader, with_loader):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        clock.spend(1)
        optimizer.zero_grad()
        loss: torch.Tensor = (model(rows) - 1).square().sum()
        loss.backward()
        return loss

    for rows in loader if with_loader else [batch()] * 4:  # noqa: B007 (the closure reads it)
        optimizer.step(closure)
    steps = ended(recorder)
    assert len(steps) == 4
    assert calls > 4
    assert sum(step.backward_passes for step in steps) == calls
    assert sum(step.times["forward"] for step in steps) == 100 * calls
    assert sum(step.times["backward"] for step in steps) == 200 * calls
    assert not any("optimizer" in step.times for step in steps), "the closure's time is not the optimizer's"
    assert sum(sum(step.times.values()) for step in steps) == 301 * calls + (8 if with_loader else 0)


def test_a_trainer_that_runs_its_step_in_a_closure_has_the_phases_of_a_loop(
    recorder, clock, model, optimizer, loader
):
    def training_step(rows: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        clock.spend(5)
        loss: torch.Tensor = model(rows).sum()
        clock.spend(3)
        loss.backward()
        return loss

    for rows in loader:  # as Lightning does
        optimizer.step(closure=lambda rows=rows: training_step(rows))
        clock.spend(4)
    steps = ended(recorder)
    assert len(steps) == BATCHES
    assert [step.times for step in steps] == [
        {
            "data_wait": 2,
            "gap_after_optimizer": 4 + 5,
            "forward": 100,
            "gap_after_forward": 3,
            "backward": 200,
            "optimizer": 10,
        }
    ] * BATCHES


def test_a_gradient_free_model_inside_a_closure_leaves_the_ledger_whole(
    recorder, clock, model, optimizer, loader
):
    teacher = copy.deepcopy(model)

    def closure() -> torch.Tensor:
        clock.spend(1)
        with torch.no_grad():
            goal = teacher(rows)
        clock.spend(6)
        loss: torch.Tensor = (model(rows) - goal).sum()
        loss.backward()
        return loss

    for rows in loader:  # noqa: B007 (the closure reads it)
        optimizer.step(closure)
        clock.spend(4)
    steps = ended(recorder)
    assert [sum(step.times.values()) for step in steps] == [2 + 1 + 100 + 6 + 100 + 200 + 10 + 4] * BATCHES
    assert all(time_ns > 0 for step in steps for time_ns in step.times.values())


# -- gradient scaling


@pytest.mark.parametrize("with_loader", [True, False])
def test_a_step_that_the_scaler_skips_is_a_step(recorder, clock, model, optimizer, loader, with_loader):
    scaler = torch.amp.GradScaler("cpu")
    for index, rows in enumerate(loader if with_loader else [batch()] * 4):
        optimizer.zero_grad()
        loss = model(rows).sum() * (float("inf") if index == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    steps = ended(recorder)
    assert [step.times.get("optimizer") for step in steps] == [10, None, 10, 10]


# -- samples and tokens


def test_samples_and_tokens_are_read_off_integer_batches(recorder, clock):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)

        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids_BT).sum()

    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [{"input_ids": torch.ones(7, dtype=torch.long), "label": index} for index in range(6)]
    for item in DataLoader(rows, batch_size=3):
        model(item["input_ids"]).backward()
        optimizer.step()
    for _ in range(2):
        model(torch.ones(2, 5, dtype=torch.long)).backward()
        optimizer.step()
    steps = ended(recorder)
    assert [(step.samples, step.tokens) for step in steps] == [(3, 21), (3, 21), (2, 10), (2, 10)]


# -- steps marked by hand


def test_a_loop_that_no_torch_optimizer_drives_has_the_steps_it_marks(recorder, clock, model):
    for _ in range(4):
        model(batch()).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        clock.spend(5)
        recorder.step_marked()
    recorder.finish()
    steps = steps_of(recorder)
    assert [sum(step.times.values()) for step in steps] == [305] * 4


@pytest.mark.parametrize("with_loader", [True, False])
def test_from_the_first_step_that_the_script_marks_no_others_are_found(
    recorder, clock, model, optimizer, loader, with_loader
):
    for index, rows in enumerate(loader if with_loader else [batch()] * 6):
        model(rows).sum().backward()
        optimizer.step()
        if index != 2:
            recorder.step_marked()
    clock.spend(50)
    steps = ended(recorder)
    later = [] if with_loader else [10, 10]
    assert [step.times["optimizer"] for step in steps] == [10, 10, 20, *later]
    assert all(time_ns > 0 for step in steps for time_ns in step.times.values())
