"""Autocast in bf16 and fp16 put under a running script, and the loss scaling of the latter."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from diagnose.actions import _autocast
from diagnose.actions._careful import Careful, Failure
from diagnose.actions._loss_scale import FIRST_GROWTH_STEPS, FIRST_SCALE, GROWTH_STEPS, LossScale
from diagnose.actions._nested import mapped
from diagnose.actions.autocast_bf16 import AutocastBf16
from diagnose.actions.autocast_fp16 import AutocastFp16
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from tests.running import SCRIPTS, TIMEOUT_S, environment
from tests.toggled import ConvNet, always, assert_equal, images, train, tuned, weights


@pytest.fixture(autouse=True)
def any_machine_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On most CPUs the probe refuses, rightly."""
    monkeypatch.setattr(_autocast, "MIN_RATE", 0.0)
    monkeypatch.setattr(_autocast, "PROBE_SIZES", (32,))


class HalfOnCpu(AutocastFp16):
    """The action as it is, save that it does not insist on a GPU."""

    def check(self, job: Job) -> None:
        """See `Action.check`."""


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    flat = [torch.cat([tensor.double().flatten() for tensor in each]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def run(
    action: Any, loop: Callable[[Any, Any], object] | None = None, **options: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with tuned(action, **options):
        if loop is None:
            train(model, optimizer, images())
        else:
            loop(model, optimizer)
    return weights(model)


# -- both


@pytest.mark.parametrize("action", [AutocastBf16(), HalfOnCpu()], ids=["bf16", "fp16"])
def test_training_stays_near_and_is_not_the_same(action: Any) -> None:
    far = distance(run(action), run(None))
    assert 0 < far < 1e-3


@pytest.mark.parametrize("action", [AutocastBf16(), HalfOnCpu()], ids=["bf16", "fp16"])
def test_the_script_gets_floats_and_evaluates_in_float(action: Any) -> None:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inside: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    with tuned(action, on=always):
        for image, label in images():
            output = model(image)
            assert output.dtype is torch.float32
            nn.functional.cross_entropy(output, label).backward()
            assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        trained = set(inside[3:])
        inside.clear()
        with torch.no_grad():
            model.eval()(image)
    assert trained == {torch.bfloat16 if isinstance(action, AutocastBf16) else torch.float16}
    assert inside == [torch.float32]


@pytest.mark.parametrize("action", [AutocastBf16(), HalfOnCpu()], ids=["bf16", "fp16"])
def test_copies_and_pickles_made_while_it_is_on_compute_in_float(action: Any) -> None:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    twins: list[nn.Module] = []

    def each(step: int) -> None:
        if step == 6:
            twins.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])

    with tuned(action, on=always):
        train(model, optimizer, images(), each=each)
    for twin in twins:
        assert not any(p._backward_hooks for p in twin.parameters())
        twin.train()(torch.randn(4, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize("action", [AutocastBf16(), HalfOnCpu()], ids=["bf16", "fp16"])
def test_a_script_with_autocast_of_its_own_is_left_as_it_is(action: Any) -> None:
    def loop(model: Any, optimizer: Any) -> None:
        for image, label in images(32):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_equal(run(action, loop, on=lambda step: step == 3), run(None, loop))


def test_what_fails_under_autocast_runs_bit_for_bit_as_alone_and_is_not_tried_again() -> None:
    class Gathers(ConvNet):
        def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
            gathered = torch.zeros(len(image_NCHW), 2)
            gathered[torch.arange(len(image_NCHW))] = super().forward(image_NCHW)
            return gathered.sum()

    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        model = Gathers()
        job, failure = Job(models=[model]), Failure()
        with AutocastBf16().apply(job, failure):
            route = job.routes[id(model)][0] if on else _directly
            route(type(model).__call__, (model, torch.ones(4, 3, 8, 8)), {}).backward()
        ends.append([*weights(model), *(p.grad for p in model.parameters())])
    assert_equal(ends[1], ends[0])
    with pytest.raises(CannotApply, match="dtypes match"), AutocastBf16().apply(job, failure):
        pass


def _directly(call: Any, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


@pytest.mark.parametrize("make", [lambda: ConvNet().bfloat16(), lambda: ConvNet().double()])
def test_weights_in_other_types_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(CannotApply, match="some parameters are"):
        AutocastBf16().check(Job(models=[make()]))


def test_fp16_is_refused_on_a_cpu() -> None:
    with pytest.raises(CannotApply, match="GPUs"):
        AutocastFp16().check(Job(models=[ConvNet()]))


def test_the_probe_refuses_by_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autocast, "MIN_RATE", 1e9)
    state = torch.get_rng_state()
    with pytest.raises(CannotApply, match=r"bfloat16 run at \d+\.\d\d times"):
        _autocast.refuse_slower("cpu", torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)


class FastGpu:
    """A device on a clock of the test's own: to begin and to wait takes 15 us beside the products.

    Attributes:
        us: What a product takes, by the size and the type.
    """

    us: ClassVar = {
        (256, torch.float32): 0.5,
        (256, torch.bfloat16): 0.5,
        (1024, torch.float32): 8,
        (1024, torch.bfloat16): 6,
        (4096, torch.float32): 512,
        (4096, torch.bfloat16): 256,
    }

    def __init__(self, patch: pytest.MonkeyPatch, min_rate: float) -> None:
        self.now_us = 0.0
        patch.setattr(_autocast.time, "perf_counter", lambda: self.now_us / 1e6)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(_autocast, "_operands", self.operands)
        patch.setattr(_autocast, "PROBE_SIZES", (256, 1024))
        patch.setattr(_autocast, "MIN_RATE", min_rate)

    def synchronize(self) -> None:
        self.now_us += 15

    def operands(self, size: int, layout: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
        class Left:
            def __matmul__(left, right: object) -> None:
                self.now_us += self.us[size, dtype]

        return Left(), None


@pytest.mark.parametrize("rate, measured", [(1.1, "fast enough"), (1.6, "fast enough"), (1.7, "too slow")])
def test_the_probe_of_a_fast_gpu_times_products_and_not_how_they_are_begun(
    rate: float, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In truth they run at 1.63 times the rate."""
    FastGpu(monkeypatch, rate)
    refuses = pytest.raises(CannotApply, match=r"1\.61 times")
    with refuses if measured == "too slow" else nullcontext():
        _autocast.refuse_slower("cuda", torch.bfloat16)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_outputs_keep_their_containers() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    single = torch.ones(2)
    value = {"pair": Pair(half, single), "list": [half, (single, "text")], "none": None}
    floats = mapped(lambda tensor: tensor.float(), value)
    assert isinstance(floats["pair"], Pair) and floats["pair"].right is single
    assert floats["list"][0].dtype is torch.float32 and floats["list"][1] is value["list"][1]
    same = (single, [single])
    assert mapped(lambda tensor: tensor.float(), same) is same


# -- loss scaling


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


@pytest.mark.gpu
@pytest.mark.parametrize("action", [AutocastBf16(), AutocastFp16()], ids=["bf16", "fp16"])
def test_on_a_gpu_training_stays_near(action: Any) -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
        job = Job(models=[model], optimizers=[optimizer], device="cuda")
        action.check(job)
        with action.prepare(job, None) as ready:
            before = action.state(job)
            with action.apply(job, ready):
                for _ in range(10):
                    image = torch.randn(32, 64, device="cuda")
                    route = job.routes[id(model)][0] if on else _directly
                    route(type(model).__call__, (model, image), {}).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            action.verify_undone(job, before)
        ends.append([tensor.cpu() for tensor in weights(model)])
    assert 0 < distance(ends[1], ends[0]) < 1e-2


def test_what_a_signal_handler_raises_in_the_model_is_the_scripts() -> None:
    """A failure of the change itself, of the same type, is not."""
    failing: list[Callable[[], None]] = []

    class Rung(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if failing:
                failing.pop()()
            return super().forward(x)

    def rings(number: int, frame: object) -> None:
        raise RuntimeError("the script's own alarm")

    def fails() -> None:
        raise RuntimeError("no such kernel")

    model, failure = Rung(2, 2), Failure()
    careful = Careful(lambda call, args, kwargs: call(*args, **kwargs), failure)
    call: Any = lambda model, x: model(x)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, rings)
    try:
        failing.append(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(RuntimeError, match="own alarm"):
            careful(call, (model, torch.ones(1, 2)), {})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not failure.reason
    failing.append(fails)
    careful(call, (model, torch.ones(1, 2)), {})
    assert "no such kernel" in failure.reason
