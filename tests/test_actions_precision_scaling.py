"""Loss scaling put under a running script in fp16: true gradients, steps left out, and where it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions import _autocast
from diagnose.actions._careful import Failure
from diagnose.actions._loss_scale import FIRST_GROWTH_STEPS, FIRST_SCALE, GROWTH_STEPS, LossScale
from diagnose.actions.autocast_fp16 import AutocastFp16
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from tests.running import SCRIPTS, TIMEOUT_S, environment
from tests.test_actions_precision import _directly, distance
from tests.toggled import assert_equal, weights


@pytest.fixture(autouse=True)
def any_machine_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On most CPUs the probe refuses, rightly."""
    monkeypatch.setattr(_autocast, "MIN_RATE", 0.0)
    monkeypatch.setattr(_autocast, "PROBE_SIZES", (32,))


class Scaled:
    """A loop whose model is called through a loss scale alone, in full precision."""

    def __init__(self, model: nn.Module, scale: float = FIRST_SCALE, lr: float = 0.1) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.failure = Failure()
        self.scale = LossScale("cpu", self.failure)
        self.scale.scale = scale
        self.scale._inverse.fill_(1 / scale)
        self.installed = self.scale.installed([model], [self.optimizer])

    def __call__(self, *args: torch.Tensor) -> Any:
        return self.scale.through(_directly)(type(self.model).__call__, (self.model, *args), {})


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_every_gradient_that_the_script_sees_is_the_true_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    given = torch.randn(3, 4, requires_grad=True)
    loop = Scaled(model)
    with loop.installed:
        for factor in (1.0, 2.0):  # accumulated
            (factor * loop(given).pow(2)).sum().backward()
    ours = [*gradients(model), given.grad]
    model.zero_grad()
    given.grad = None
    for factor in (1.0, 2.0):
        (factor * model(given).pow(2)).sum().backward()
    torch.testing.assert_close(ours, [*gradients(model), given.grad])


def test_a_result_that_the_loss_leaves_out_gets_no_gradient_and_harms_nothing() -> None:
    model, given = nn.Linear(4, 6), torch.randn(3, 4)
    loop = Scaled(nn.Sequential(model, nn.Unflatten(1, (2, 3))))
    route = loop.scale.through(lambda call, args, kwargs: call(*args, **kwargs).unbind(1))
    with loop.installed:
        route(type(loop.model).__call__, (loop.model, given), {})[0].sum().backward()
    ours = gradients(model)
    model.zero_grad()
    model(given)[:, :3].sum().backward()
    torch.testing.assert_close(ours, gradients(model))


def test_gradients_inside_are_multiplied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inside: list[torch.Tensor] = []
    model[0].register_full_backward_hook(lambda module, into, out: inside.append(out[0]))
    loop = Scaled(model, scale=8.0)
    with loop.installed:
        loop(torch.ones(1, 2)).sum().backward()
    expected = 8.0 * model[1].weight.sum(0, keepdim=True)
    torch.testing.assert_close(inside[0], expected)


def test_small_losses_lose_less_than_without_a_scale() -> None:
    """Gradients of 1e-8 are nothing in fp16."""
    errors = []
    for scale in (1.0, FIRST_SCALE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        image = torch.randn(8, 16)
        (1e-4 * model(image)).mean().backward()
        true = gradients(model)
        model.zero_grad()
        loop = Scaled(model, scale=scale)
        route = loop.scale.through(_autocast.under_autocast("cpu", torch.float16))
        with loop.installed:
            (1e-4 * route(type(model).__call__, (model, image), {})).mean().backward()
        errors.append(distance(gradients(model), true))
    assert errors[1] < 5e-3 < errors[0]


def test_a_step_with_an_overflow_is_left_out_and_the_scale_halves() -> None:
    model = nn.Linear(2, 1)
    loop = Scaled(model)
    before = weights(model)
    with loop.installed:
        loop(torch.tensor([[float("inf"), 1.0]])).sum().backward()
        seen = [p.grad for p in model.parameters()]
        loop.optimizer.step()
        assert [p.grad for p in model.parameters()] == seen, "the script sees them again"
        assert_equal(weights(model), before)
        assert (loop.scale.scale, loop.scale.num_skipped) == (FIRST_SCALE / 2, 1)
        loop.optimizer.zero_grad()
        loop(torch.ones(1, 2)).sum().backward()
        loop.optimizer.step()
    torch.testing.assert_close(weights(model), [before[0] - 0.1, before[1] - 0.1])


def test_another_optimizer_is_given_no_overflow_of_ours() -> None:
    """It makes each step: nobody could leave one out."""
    model = nn.Linear(2, 1)
    loop = Scaled(model, scale=2.0**127)
    with loop.installed:
        loop.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = weights(model)
        loop(torch.tensor([[4.0, 1.0]])).sum().backward()
        loop.optimizer.step()
    torch.testing.assert_close(weights(model), [before[0] - torch.tensor([[0.4, 0.1]]), before[1] - 0.1])
    assert "another optimizer" in loop.failure.reason


def test_an_overflow_that_clipping_hides_still_skips_the_step() -> None:
    model = nn.Linear(2, 1)
    loop = Scaled(model)
    before = weights(model)
    with loop.installed:
        loop(torch.tensor([[float("inf"), 1.0]])).sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        loop.optimizer.step()
    assert_equal(weights(model), before)


def test_an_overflow_in_gradients_that_are_thrown_away_skips_nothing() -> None:
    """As a GAN's generator leaves them in its critic."""
    model = nn.Linear(2, 1)
    loop = Scaled(model)
    before = weights(model)
    with loop.installed:
        loop(torch.tensor([[float("inf"), 1.0]])).sum().backward()
        loop.optimizer.zero_grad()
        loop(torch.ones(1, 2)).sum().backward()
        loop.optimizer.step()
    assert loop.scale.num_skipped == 0
    torch.testing.assert_close(weights(model), [before[0] - 0.1, before[1] - 0.1])


@pytest.mark.extended
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    script = SCRIPTS / "overflow_on_one_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "store")],
            env=environment(WORLD_SIZE="2", RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    told, other = map(json.loads, outputs)  # and no exit codes: gloo's end aborts now and then
    start, overflow, fine, clipped = told["weights"]
    assert other["weights"] == told["weights"]
    assert overflow == start != fine != clipped
    assert (told["skipped"], other["skipped"]) == ([0, 1, 1, 1],) * 2
    assert told["scales"][:3] == other["scales"][:3] == [FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
    assert told["scales"][3] == FIRST_SCALE / 4, "clipping hides it from the others, not from its own rank"


@pytest.mark.parametrize(
    "look", [lambda job, loop: AutocastFp16().check(job), lambda job, loop: enter(loop)]
)
def test_hooks_of_the_scripts_own_on_parameters_are_refused(look: Callable[[Job, Scaled], object]) -> None:
    """They run before ours, so they would clip multiplied gradients."""
    model = nn.Linear(2, 1)
    loop = Scaled(model)
    model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(CannotApply, match="hooks on parameters"):
        look(Job(models=[model], device="cuda"), loop)
    assert len(model.weight._backward_hooks or ()) == 1 and not model.bias._backward_hooks


def enter(loop: Scaled) -> None:
    with loop.installed:
        pass


def test_the_scale_doubles_after_many_good_steps_and_sooner_before_the_first_bad_one() -> None:
    loop = Scaled(nn.Linear(1, 1))
    with loop.installed:
        for overflowed in [*[False] * FIRST_GROWTH_STEPS, True, *[False] * GROWTH_STEPS]:
            seen = loop.scale.scale
            loop.scale.adapt(loop.optimizer, overflowed)
    assert (seen, loop.scale.scale) == (FIRST_SCALE, 2 * FIRST_SCALE)
    assert loop.scale._inverse.item() == 1 / (2 * FIRST_SCALE)


def test_two_models_in_a_row_do_not_multiply_twice() -> None:
    torch.manual_seed(0)
    generator, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    noise = torch.randn(4, 2)
    judge(generator(noise)).pow(2).sum().backward()
    true = gradients(generator) + gradients(judge)
    generator.zero_grad()
    judge.zero_grad()
    failure = Failure()
    scale = LossScale("cpu", failure)
    with scale.installed([generator, judge], []):
        made = scale.through(_directly)(type(generator).__call__, (generator, noise), {})
        scale.through(_directly)(type(judge).__call__, (judge, made), {}).pow(2).sum().backward()
    assert not failure.reason
    torch.testing.assert_close(gradients(generator) + gradients(judge), true)


def penalty(loop: Scaled, image: torch.Tensor) -> torch.Tensor:
    return loop(image).sum() + sum(p.pow(2).sum() for p in loop.model.parameters())


def gradient_penalty(loop: Scaled, image: torch.Tensor) -> torch.Tensor:
    image = image.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loop(image).pow(2).sum(), image, create_graph=True)
    return slope.pow(2).sum()


@pytest.mark.parametrize("loss", [penalty, gradient_penalty])
def test_parameters_used_outside_the_model_end_the_scaling_at_once(
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model, image = nn.Linear(3, 2), torch.randn(4, 3)
    loop = Scaled(model)
    with loop.installed:
        loss(loop, image).backward()
    ours = gradients(model)
    assert "outside the model" in loop.failure.reason
    model.zero_grad()
    plain: Any = Scaled(model)
    plain.scale.through = lambda route: route
    loss(plain, image).backward()
    torch.testing.assert_close(ours, gradients(model))


def test_a_closure_ends_the_scaling() -> None:
    loop = Scaled(nn.Linear(2, 1))
    with loop.installed:

        def closure() -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss: torch.Tensor = loop(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        loop.optimizer.step(closure)
    assert "closure" in loop.failure.reason
    torch.testing.assert_close(gradients(loop.model), [torch.ones(1, 2), torch.ones(1)])


def test_leaving_takes_every_hook_out() -> None:
    loop = Scaled(nn.Linear(2, 1))
    backward = torch.autograd.backward
    with loop.installed:
        assert torch.autograd.backward is not backward
    assert torch.autograd.backward is backward
    assert not any(p._backward_hooks for p in loop.model.parameters())
    assert not loop.optimizer._optimizer_step_pre_hooks and not loop.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("make", [torch.optim.LBFGS, type("Own", (torch.optim.SGD,), {})])
def test_optimizers_whose_steps_cannot_be_skipped_are_refused(make: Any) -> None:
    model = nn.Linear(2, 1)
    job = Job(models=[model], optimizers=[make(model.parameters(), lr=0.1)], device="cuda")
    with pytest.raises(CannotApply, match="skip"):
        AutocastFp16().check(job)
