"""A step of a loop that asks no loader: it begins where the batch meets the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import SlowModel, SlowOptimizer
from tests.training_loops import BATCHES, batch, ended

pytest_plugins = ("tests.training_loops",)


@pytest.mark.parametrize("source", ["function", "generator", "list"])
def test_a_loop_without_a_loader_makes_a_step_of_each_optimizer_step(
    recorder, clock, model, optimizer, source
):
    def get_batch() -> torch.Tensor:
        clock.spend(30)
        return batch(3)

    sources: dict[str, Callable[[], Any]] = {
        "function": lambda: (get_batch() for _ in iter(lambda: clock.now_ns < 0, True)),
        "generator": lambda: (get_batch() for _ in range(5)),
        "list": lambda: [batch(3)] * 5,
    }
    for _, rows in zip(range(5), sources[source](), strict=False):
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [3] * 5
    # The first step begins, and every later one, where the batch meets the model.
    build = 0 if source == "list" else 30
    assert [sum(step.times.values()) for step in steps] == [310 + build] * 4 + [310]


def test_a_batch_built_between_forward_and_backward_ends_no_step(recorder, clock, model, optimizer):
    rows = batch()
    for _ in range(5):  # as nanoGPT prefetches
        loss = model(rows).sum()
        clock.spend(30)
        rows = batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    steps = ended(recorder)
    assert len(steps) == 5
    assert {step.times["gap_after_forward"] for step in steps} == {30}


def test_accumulation_without_a_loader_is_one_step_of_each_optimizer_step(recorder, model, optimizer):
    for _ in range(4):
        for _ in range(3):
            model(batch()).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.backward_passes for step in steps] == [3] * 4
    assert [step.samples for step in steps] == [6] * 4


def test_two_optimizers_without_a_loader_are_one_step(recorder, clock):
    generator, critic = SlowModel(clock, 100, 200), SlowModel(clock, 30, 40)
    for_generator, for_critic = SlowOptimizer(clock, generator, 10), SlowOptimizer(clock, critic, 5)
    for _ in range(4):
        (critic(batch()).sum() - critic(batch()).sum()).backward()
        for_critic.step()
        critic(generator(batch()).expand(2, 4)).sum().backward()
        for_generator.step()
    steps = ended(recorder)
    assert [step.times["optimizer"] for step in steps] == [15] * 4
    assert [step.samples for step in steps] == [2] * 4, "the generator's batch, not all that the critic saw"


def test_a_critic_that_trains_more_often_without_a_loader_makes_a_step_of_each(recorder, clock):
    generator, critic = SlowModel(clock), SlowModel(clock)
    for_generator, for_critic = SlowOptimizer(clock, generator, 10), SlowOptimizer(clock, critic, 5)
    for _ in range(3):
        for _ in range(2):
            critic(batch()).sum().backward()
            for_critic.step()
        generator(batch()).sum().backward()
        for_generator.step()
    assert [step.times["optimizer"] for step in ended(recorder)] == [5, 15, 5, 15, 5, 15]


def test_two_models_trained_one_after_the_other_are_one_step_short_where_they_change(recorder, clock):
    """At the change, two models trained in turn look like two that are trained together."""
    models = [SlowModel(clock, 100, 200) for _ in range(2)]
    optimizers = [SlowOptimizer(clock, model, 10) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
    assert [step.times["optimizer"] for step in ended(recorder)] == [10, 10, 20, 10, 10]


def test_two_models_trained_one_after_the_other_on_a_loader_have_all_their_steps(recorder, clock, loader):
    for _ in range(2):
        model = SlowModel(clock, 100, 200)
        optimizer = SlowOptimizer(clock, model, 10)
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
    assert [step.times["optimizer"] for step in ended(recorder)] == [10] * 2 * BATCHES


def test_a_loop_whose_loss_no_module_computes_has_steps(recorder, clock):
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        clock.spend(50)
        (weight * batch()).sum().backward()
        optimizer.step()
    assert len(ended(recorder)) == 5


def test_gradients_written_by_hand_make_steps(recorder, clock):
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        clock.spend(50)
        weight.grad = torch.ones(4)
        optimizer.step()
    steps = ended(recorder)
    assert len(steps) == 5
    assert [sum(step.times.values()) for step in steps] == [50, 50, 50, 50, 0]


def test_an_optimizer_in_the_backward_pass_makes_one_step_of_all_its_parameters(recorder, clock, model):
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(4):
        model(batch()).sum().backward()
        clock.spend(6)
    steps = ended(recorder)
    assert len(steps) == 4
    assert {step.times["backward"] for step in steps} == {200}


def test_an_optimizer_in_the_backward_pass_makes_one_step_of_each_batch(recorder, model, loader):
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for rows in loader:
        model(rows).sum().backward()
    assert [step.samples for step in ended(recorder)] == [2] * BATCHES


class Within(torch.autograd.Function):
    """Its backward pass runs another one inside, so often that autograd goes on in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, depth: int, innermost: Callable[[], None]) -> torch.Tensor:
        ctx.depth, ctx.innermost = depth, innermost
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.depth:
            ctx.innermost()
        else:
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                Within.apply(leaf, ctx.depth - 1, ctx.innermost).sum().backward()
        return gradient, None, None


@pytest.mark.parametrize("with_loader", [True, False])
def test_an_optimizer_in_a_thread_of_autograd_makes_steps(recorder, model, optimizer, loader, with_loader):
    """As the gradients of a GPU's tensors are computed in one."""
    threads = set()

    def innermost() -> None:
        threads.add(threading.get_ident())
        optimizer.step()

    for rows in loader if with_loader else [batch()] * BATCHES:
        Within.apply(model(rows), 70, innermost).sum().backward()
    assert threads.isdisjoint({threading.get_ident()})
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * BATCHES
    assert [step.backward_passes for step in steps] == [1] * BATCHES
