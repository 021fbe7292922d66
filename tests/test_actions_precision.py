"""Autocast in bf16 and fp16 put under a running script."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from diagnose.actions import _autocast
from diagnose.actions._careful import Careful, Failure
from diagnose.actions._nested import mapped
from diagnose.actions.autocast_bf16 import AutocastBf16
from diagnose.actions.autocast_fp16 import AutocastFp16
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
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
