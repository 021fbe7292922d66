"""Gradients that are thrown away before an optimizer uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.autograd_graph import LAST_PASS, AutogradGraphHook
from diagnose.hooks.backward import BackwardHook
from diagnose.hooks.dropped_gradients import LAST_LOOK, DroppedGradientsHook
from diagnose.hooks.optimizer import OptimizerHook

Round = Callable[[], None]


class Adversaries:
    """A generator and a critic, and what a step of each is."""

    def __init__(
        self, *, detach: bool = True, freeze: bool = False, to_none: bool = True, fused: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-3, fused=fused)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3, fused=fused)
        self.detach, self.freeze, self.to_none = detach, freeze, to_none

    def round(self, backward: Callable[[torch.Tensor], None]) -> None:
        fake = self.generator(torch.randn(64, 8))
        self.of_critic.zero_grad(set_to_none=self.to_none)
        backward(self.critic(torch.randn(64, 16)).mean())
        backward(-self.critic(fake.detach() if self.detach else fake).mean())
        self.of_critic.step()
        self.of_generator.zero_grad(set_to_none=self.to_none)
        self.critic.requires_grad_(not self.freeze)
        backward(self.critic(self.generator(torch.randn(64, 8))).mean())
        self.critic.requires_grad_()
        self.of_generator.step()


def told(rounds: Callable[[Callable[[torch.Tensor], None]], None]) -> dict[str, Any]:
    """Returns what the hook tells of a loop, each of whose rounds gets the function to go backward with."""
    recorder = Recorder()
    recorder.thread = get_ident()
    with (
        BackwardHook().install(recorder),
        OptimizerHook().install(recorder),
        DroppedGradientsHook().install(recorder),
    ):
        for _ in range(LAST_LOOK):
            rounds(torch.Tensor.backward)
    assert not recorder.looks.on_backward
    assert not recorder.notes
    return dict(recorder.facts)


def of_gan(**options: bool) -> dict[str, Any]:
    pair = Adversaries(**options)
    return told(pair.round)


@pytest.mark.parametrize("fused", [True, False])
def test_a_generator_behind_a_batch_that_was_not_detached_is_told(fused: bool):
    fact = of_gan(detach=False, freeze=True, fused=fused)["dropped"]
    assert fact["num_tensors"] == 4
    assert fact["unwanted"]["num_ops"] > 0
    assert fact["is_apart"]
    assert 0 < fact["unwanted"]["backward_ns"] < fact["total"]["backward_ns"]
    assert Path(fact["file"]) == Path(__file__)


def test_weights_of_a_critic_that_only_passes_the_gradient_on_are_told():
    fact = of_gan()["dropped"]
    assert (fact["num_tensors"], fact["unwanted"]["num_ops"]) == (4, 0)
    assert fact["unwanted"]["flops"] > 0


def test_where_nothing_is_thrown_away_nothing_is_told():
    fact = of_gan(freeze=True)["dropped"]
    assert (fact["num_tensors"], fact["unwanted"]["flops"]) == (0, 0)


def test_of_gradients_that_are_overwritten_with_zeros_nothing_is_known():
    assert of_gan(detach=False, to_none=False)["dropped"]["num_tensors"] == 0


def test_accumulated_gradients_are_used():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]

    def accumulate(backward: Callable[[torch.Tensor], None]) -> None:
        for _ in range(3):
            backward(second(first(torch.randn(2, 4))).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert told(accumulate)["dropped"]["num_tensors"] == 0


def test_a_step_that_is_left_out_now_and_then_throws_nothing_away():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    count = 0

    def with_overflows(backward: Callable[[torch.Tensor], None]) -> None:
        nonlocal count
        count += 1
        backward(second(first(torch.randn(2, 4))).sum())
        for optimizer in optimizers:
            if count % 4:
                optimizer.step()
            optimizer.zero_grad()

    assert told(with_overflows)["dropped"]["num_tensors"] == 0


def test_gradients_that_are_read_without_any_step_are_not_said_to_be_thrown_away():
    probe, trained = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (probe, trained)]

    rounds = 0

    def read(backward: Callable[[torch.Tensor], None]) -> None:
        nonlocal rounds
        rounds += 1
        backward(trained(probe(torch.randn(2, 4))).sum())
        for optimizer in optimizers[rounds > 1 :]:  # the probe's once, as it begins
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    assert told(read)["dropped"]["num_tensors"] == 0


@pytest.mark.parametrize("by_name", [True, False])
def test_a_gradient_penalty_throws_nothing_away(by_name: bool):
    """`autograd.grad` leaves no gradient in any parameter that it passes."""
    pair = Adversaries(freeze=True)

    def penalised(backward: Callable[[torch.Tensor], None]) -> None:
        between = torch.randn(64, 16, requires_grad=True)
        score = pair.critic(between).sum()
        given = {"outputs": score, "inputs": between} if by_name else {}
        (slope,) = torch.autograd.grad(*(() if by_name else (score, between)), create_graph=True, **given)
        pair.of_critic.zero_grad()
        backward(slope.norm() + pair.critic(torch.randn(64, 16)).mean())
        pair.of_critic.step()
        pair.of_generator.zero_grad()
        pair.critic.requires_grad_(False)
        backward(pair.critic(pair.generator(torch.randn(64, 8))).mean())
        pair.critic.requires_grad_()
        pair.of_generator.step()

    assert told(penalised)["dropped"]["num_tensors"] == 0


def test_a_pass_that_is_told_where_to_leave_gradients_makes_no_others():
    pair = Adversaries(detach=False, freeze=True)

    def to_the_critic(backward: Callable[[torch.Tensor], None]) -> None:
        pair.of_critic.zero_grad()
        fake = pair.generator(torch.randn(64, 8))
        pair.critic(fake).mean().backward(inputs=list(pair.critic.parameters()))
        pair.of_critic.step()
        pair.of_generator.zero_grad()
        pair.critic.requires_grad_(False)
        backward(pair.critic(pair.generator(torch.randn(64, 8))).mean())
        pair.critic.requires_grad_()
        pair.of_generator.step()

    assert told(to_the_critic)["dropped"]["num_tensors"] == 0


def test_two_pairs_of_one_architecture_are_told_apart():
    pairs = [Adversaries(detach=False, freeze=True) for _ in range(2)]

    def both(backward: Callable[[torch.Tensor], None]) -> None:
        for pair in pairs:
            pair.round(backward)

    assert told(both)["dropped"]["num_tensors"] == 8


def test_a_normed_critic_is_to_be_switched_off_and_not_cut_off():
    pair = Adversaries()
    for layer in pair.critic:
        if isinstance(layer, nn.Linear):
            nn.utils.parametrizations.weight_norm(layer)
    pair.of_critic = torch.optim.SGD(pair.critic.parameters(), lr=1e-3)
    fact = told(pair.round)["dropped"]
    assert fact["unwanted"]["num_ops"] > 0
    assert not fact["is_apart"]


class Tuned:
    """A backbone that one optimizer has together with a head, and what a step of it is.

    Args:
        rate: The learning rate of the backbone.
        drops: What is done to the gradients of the backbone before the step.
    """

    def __init__(self, rate: float = 1e-3, drops: Callable[[nn.Parameter], None] | None = None) -> None:
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 2)
        groups = [{"params": self.backbone.parameters(), "lr": rate}, {"params": self.head.parameters()}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3)
        self.drops = drops

    def round(self, backward: Callable[[torch.Tensor], None]) -> None:
        self.optimizer.zero_grad()
        backward(self.head(self.backbone(torch.randn(32, 8))).mean())
        for parameter in self.backbone.parameters() if self.drops else ():
            assert self.drops is not None
            self.drops(parameter)
        self.optimizer.step()


def forget(parameter: nn.Parameter) -> None:
    parameter.grad = None


def update(parameter: nn.Parameter) -> None:
    """An update of the loop's own, after which the optimizer finds nothing."""
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def test_layers_whose_gradients_the_only_optimizer_never_gets_are_told():
    fact = told(Tuned(drops=forget).round)["dropped"]
    assert (fact["num_tensors"], fact["never_used"], fact["is_apart"]) == (4, True, True)
    assert 0 < fact["unwanted"]["backward_ns"] < fact["total"]["backward_ns"]


def test_layers_that_the_loop_updates_itself_are_not():
    assert told(Tuned(drops=update).round)["dropped"]["num_tensors"] == 0


def test_gradients_that_are_put_together_before_the_step_are_used():
    """Those of each task are put aside; what the optimizer gets is made of all of them."""
    pair = Tuned()
    unused = nn.Parameter(torch.zeros(3))  # steps without a gradient
    pair.optimizer.add_param_group({"params": [unused]})

    def surgery(backward: Callable[[torch.Tensor], None]) -> None:
        kept: list[torch.Tensor] = []
        parameters = [*pair.backbone.parameters(), *pair.head.parameters()]
        for _ in range(2):
            pair.optimizer.zero_grad()
            backward(pair.head(pair.backbone(torch.randn(32, 8))).mean())
            kept.append(torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]))
        pair.optimizer.zero_grad()
        mean = torch.stack(kept).mean(0)
        for each, part in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
            each.grad = part.view_as(each)
        pair.optimizer.step()

    assert told(surgery)["dropped"]["num_tensors"] == 0


def test_gradients_that_a_closure_of_the_step_computes_are_used():
    model, unused = nn.Linear(4, 4), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), unused], lr=0.1)

    def closed(backward: Callable[[torch.Tensor], None]) -> None:
        def closure() -> None:
            backward(model(torch.randn(2, 4)).sum())

        optimizer.step(closure)
        optimizer.zero_grad()

    assert told(closed).get("dropped", {"num_tensors": 0})["num_tensors"] == 0


def of_graph(tuned: Tuned, care: Callable[[int], None] = lambda step: None) -> list[dict[str, Any]]:
    """Returns what is told of the graph after each step."""
    recorder = Recorder()
    recorder.thread = get_ident()
    facts: list[dict[str, Any]] = []
    with (
        BackwardHook().install(recorder),
        OptimizerHook().install(recorder),
        AutogradGraphHook().install(recorder),
    ):
        for step in range(LAST_PASS + 6):
            tuned.round(torch.Tensor.backward)
            care(step)
            for cared in recorder.looks.cared:
                cared()
            facts.append(dict(recorder.facts.get("graph", {})))
        assert recorder.looks.cared
    assert not recorder.looks.cared and not recorder.notes
    return facts


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_layers_with_a_learning_rate_of_zero_are_not_trained(rate: float):
    fact = of_graph(Tuned(rate=rate))[-1]
    resting = 0 if rate else 4
    assert (fact["num_resting_tensors"], fact["num_unwanted_tensors"]) == (resting, resting)
    assert bool(fact["unwanted"]["num_ops"]) is not bool(rate)


def test_layers_that_are_trained_later_are_trained():
    tuned = Tuned(rate=0.0)

    def thaw(step: int) -> None:
        if step == LAST_PASS + 3:
            tuned.optimizer.param_groups[0]["lr"] = 1e-4

    facts = of_graph(tuned, thaw)
    assert facts[LAST_PASS + 2]["num_unwanted_tensors"] == 4
    fact = facts[-1]
    assert (fact["num_resting_tensors"], fact["num_unwanted_tensors"]) == (0, 0)
    assert fact["unwanted"]["num_ops"] == 0


def test_where_every_learning_rate_is_zero_a_warm_up_has_not_begun():
    tuned = Tuned(rate=0.0)
    tuned.optimizer.param_groups[1]["lr"] = 0.0
    assert of_graph(tuned)[-1]["num_unwanted_tensors"] == 0


def test_layers_that_change_with_a_learning_rate_of_zero_are_trained():
    tuned = Tuned(rate=0.0, drops=update)
    assert of_graph(tuned)[-1]["num_unwanted_tensors"] == 0


def test_a_loop_with_one_optimizer_is_not_looked_at():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def alone(backward: Callable[[torch.Tensor], None]) -> None:
        backward(model(torch.randn(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

    assert "dropped" not in told(alone)


@pytest.mark.parametrize("broken", [True, False])
def test_the_loop_goes_on_where_a_graph_is_none(broken: bool):
    pair = Adversaries()

    def odd(backward: Callable[[torch.Tensor], None]) -> None:
        pair.round(backward)
        if broken:
            backward(torch.zeros((), requires_grad=True))

    assert ("dropped" in told(odd)) is not broken
