"""What is evaluation between training steps, and what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.fakes import SlowData
from tests.training_loops import BATCHES, batch, ended

pytest_plugins = ("tests.training_loops",)


def evaluations() -> dict[str, Callable[[nn.Module, Any], None]]:
    def in_both(model: nn.Module, batches: Any) -> None:
        model.eval()
        with torch.no_grad():
            for rows in batches:
                model(rows)
        model.train()

    def in_eval_mode(model: nn.Module, batches: Any) -> None:
        model.eval()
        for rows in batches:
            model(rows)
        model.train()

    def without_gradients(model: nn.Module, batches: Any) -> None:
        with torch.no_grad():
            for rows in batches:
                model(rows)

    @torch.inference_mode()
    def in_inference_mode(model: nn.Module, batches: Any) -> None:
        for rows in batches:
            model(rows)

    def without_gradients_around_each_call(model: nn.Module, batches: Any) -> None:
        for rows in batches:
            with torch.no_grad():
                model(rows)

    return {function.__name__: function for function in vars().values() if callable(function)}


@pytest.mark.parametrize("way", evaluations())
def test_evaluation_in_the_middle_is_part_of_a_step_and_ends_none(
    recorder, clock, model, optimizer, loader, way
):
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for index, rows in enumerate(loader):
        model(rows).sum().backward()
        optimizer.step()
        if index % 2 == 1:
            evaluations()[way](model, held_out)
    steps = ended(recorder)
    assert len(steps) == BATCHES
    assert [step.samples for step in steps] == [2] * BATCHES
    # Around each call alone, the first batch cannot be told from a training batch when it is asked for.
    batches = 2 if way == "without_gradients_around_each_call" else 3
    spent = [step.times.get("evaluation", 0) for step in steps]
    # ... so the step before it ends there, and the evaluation after the last step belongs to none.
    expected = [0, 0, 314, 0] if batches == 2 else [0, 321, 0, 321]
    assert spent == expected
    assert sum(sum(step.times.values()) for step in steps) == steps[-1].end_ns - 1_000_000


def test_training_goes_on_after_an_evaluation_of_a_model_inside_another(
    recorder, clock, model, optimizer, loader
):
    """As DDP holds the user's: `train()` of the one calls that of the other."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.module(rows)

    outer = Outer()
    for rows in loader:
        outer.train()
        outer(rows).sum().backward()
        optimizer.step()
        outer.eval()
        with torch.no_grad():
            outer(rows)
    steps = ended(recorder)
    assert len(steps) == BATCHES
    assert steps[0].times["forward"] > 0 and steps[0].times["backward"] > 0
    for phase in ("forward", "backward"):
        assert [step.times[phase] for step in steps] == [steps[0].times[phase]] * BATCHES


@pytest.mark.parametrize("way", evaluations())
def test_evaluation_in_the_middle_of_a_loop_without_a_loader_ends_no_step(
    recorder, clock, model, optimizer, way
):
    for index in range(6):
        model(batch()).sum().backward()
        optimizer.step()
        if index % 2 == 1:
            evaluations()[way](model, [batch()] * 3)
    steps = ended(recorder)
    assert len(steps) == 6
    assert [step.times.get("evaluation", 0) for step in steps] == [0, 300, 0, 300, 0, 0]


def test_evaluation_with_gradients_and_in_training_mode_ends_no_step(recorder, clock, model, optimizer):
    """Nothing tells it from training but that no optimizer steps."""
    for index in range(6):
        model(batch()).sum().backward()
        optimizer.step()
        if index % 2 == 1:
            for _ in range(3):
                model(batch())
    assert len(ended(recorder)) == 6


def test_a_second_loader_that_is_only_evaluated_ends_no_step_twice(
    recorder, clock, model, optimizer, loader
):
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for rows in loader:
        model(rows).sum().backward()
        optimizer.step()
        for more in held_out:
            model(more)
    steps = ended(recorder)
    assert len(steps) == BATCHES


def test_code_between_gradient_free_calls_is_evaluation_and_code_before_training_is_not(
    recorder, clock, model, optimizer
):
    for _ in range(3):
        model(batch()).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(3):
                clock.spend(5)
                model(batch())
        clock.spend(1)
    steps = ended(recorder)
    assert [step.times["evaluation"] for step in steps[:2]] == [3 * 100 + 2 * 5] * 2
    assert [step.times["gap_after_optimizer"] for step in steps[:2]] == [5] * 2
    assert [step.times["gap_after_rest"] for step in steps[:2]] == [1] * 2


def test_what_lies_between_an_actor_and_a_target_network_is_no_evaluation(
    recorder, clock, model, optimizer
):
    """As in TD3 and DQN: the environment is stepped and a batch is drawn from a buffer."""
    target = copy.deepcopy(model).requires_grad_(False)
    for _ in range(3):
        with torch.no_grad():
            model(batch())
        clock.spend(5)
        with torch.no_grad():
            wanted = target(batch())
        (model(batch()) - wanted).sum().backward()
        optimizer.step()
    for step in ended(recorder)[:2]:
        assert step.times["evaluation"] == 2 * 100
        assert step.times["gap_after_rest"] == 5


def test_a_loss_that_is_a_module_and_its_model_are_one_evaluation(recorder, clock, model, optimizer):
    loss = nn.MSELoss()
    for _ in range(3):
        loss(model(batch()), batch()).backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(3):
                clock.spend(5)
                loss(model(batch()), batch())
    for step in ended(recorder)[:2]:
        assert step.times["evaluation"] == 3 * 100 + 2 * 5


def test_everything_in_evaluation_mode_is_evaluation_but_a_hooked_save(
    recorder, clock, model, optimizer, loader, tmp_path
):
    class Slow:
        def __reduce__(self) -> Any:
            clock.spend(9)
            return (list, ())

    for rows in loader:
        model(rows).sum().backward()
        optimizer.step()
        model.eval()
        clock.spend(5)
        torch.save(Slow(), tmp_path / "checkpoint")
        clock.spend(6)
        model.train()
        clock.spend(8)
    for step in ended(recorder):
        assert step.times["evaluation"] == 11
        assert step.times["checkpoint"] == 9
        assert step.times["gap_after_rest"] == 8


def test_a_frozen_teacher_in_evaluation_mode_makes_no_evaluation(recorder, model, optimizer, loader):
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    for rows in loader:
        (model(rows) - teacher(rows)).sum().backward()
        optimizer.step()
        teacher.eval()
    steps = ended(recorder)
    assert len(steps) == BATCHES
    assert {step.times["forward"] for step in steps} == {200}
    assert not any("evaluation" in step.times for step in steps)
    assert [known() for known in recorder.met.modules] == [model]


def test_training_in_evaluation_mode_is_training(recorder, clock, model, optimizer, loader):
    """Fine-tuning with frozen statistics switches the model to evaluation mode and trains it."""
    for _ in range(2):
        model.eval()
        for rows in loader:
            clock.spend(3)
            model(rows).sum().backward()
            optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * 2 * BATCHES
    times = {"data_wait": 2, "gap_after_data_wait": 3, "forward": 100, "backward": 200, "optimizer": 10}
    assert [step.times for step in steps] == [times] * 2 * BATCHES
    assert [known() for known in recorder.met.modules] == [model]


def test_gradients_taken_in_an_evaluation_are_evaluation(recorder, clock, model, optimizer, loader):
    """As those of the energy by the positions are, which are forces."""
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for index, rows in enumerate(loader):
        model(rows).sum().backward()
        optimizer.step()
        if index % 2 == 1:
            model.eval()
            for positions in held_out:
                positions.requires_grad_()
                (forces,) = torch.autograd.grad(model(positions).sum(), positions)
                nn.MSELoss()(forces, positions)
                clock.spend(1)
            model.train()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * BATCHES
    assert [step.backward_passes for step in steps] == [1] * BATCHES
    assert [step.times.get("evaluation", 0) for step in steps] == [0, 3 * 308, 0, 3 * 308]
    assert {step.times["backward"] for step in steps} == {200}


def test_an_attack_on_the_batch_in_hand_is_training(recorder, clock, model, optimizer, loader):
    """Adversarial training computes its examples in evaluation mode."""
    for rows in loader:
        model.eval()
        clock.spend(5)
        rows.requires_grad_()
        (gradient,) = torch.autograd.grad(model(rows).sum(), rows)
        model.train()
        model(rows + gradient).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.times["forward"] for step in steps] == [200] * BATCHES
    assert [step.times["backward"] for step in steps] == [400] * BATCHES
    assert not any("evaluation" in step.times for step in steps)


@pytest.mark.parametrize("way", evaluations())
def test_evaluation_with_a_training_batch_in_hand_is_evaluation(
    recorder, clock, model, optimizer, loader, way
):
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for index, rows in enumerate(loader):
        if index == 1:
            evaluations()[way](model, held_out)
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert len(steps) == BATCHES
    batches = 2 if way == "without_gradients_around_each_call" else 3
    assert steps[1].times["evaluation"] == 3 * 100 + batches * 7
    assert [step.samples for step in steps] == [2] * BATCHES
