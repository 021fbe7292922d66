"""The numerics check: what it lets pass, what it catches, and that training does not notice it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diagnose.actions import _shadow_step
from diagnose.actions._judge import Verdict
from diagnose.actions._shadow import compare_gradients, compare_update
from diagnose.actions._shadow_step import computes_in_tf32
from diagnose.actions._watch import watched
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from tests.checked_training import (
    EXACT,
    MODELS,
    PRECISION,
    ROUNDING,
    ConvNet,
    Training,
    Transformer,
    autocast_at_root,
    checked,
    fused,
    route,
    scaled,
    trained,
)
from tests.fakes import FakeClock, measured

# -- what passes


@MODELS
def test_doing_nothing_is_equal_bit_for_bit(kind: Any) -> None:
    verdict = checked(trained(kind, dropout=0.1), nullcontext(), EXACT)
    assert verdict == Verdict(ok=True, reason="equal bit for bit")


def test_another_layout_in_memory_is_rounding_and_not_exact() -> None:
    def channels_last(call: Any, args: Any, kwargs: Any) -> Any:
        return call(args[0], args[1].to(memory_format=torch.channels_last))

    training = trained(ConvNet)
    verdict = checked(training, route(training.job, training.model, channels_last), ROUNDING)
    assert verdict.ok and 0 < verdict.error < verdict.allowed < 1e-3, verdict
    assert verdict.reason.endswith("allowed by another order of the samples")
    assert not checked(training, route(training.job, training.model, channels_last), EXACT).ok


@MODELS
def test_bfloat16_is_precision_and_not_rounding(kind: Any) -> None:
    training = trained(kind)
    verdict = checked(training, autocast_at_root(training), PRECISION)
    assert verdict.ok and verdict.error > 1e-3, verdict
    assert verdict.reason.endswith("allowed by a tenth of what another mini-batch changes")
    assert not checked(training, autocast_at_root(training), ROUNDING).ok


def test_a_script_in_bfloat16_is_judged_by_its_own_rounding() -> None:
    training = trained(ConvNet, autocast=True)

    def channels_last(call: Any, args: Any, kwargs: Any) -> Any:
        return call(args[0], args[1].to(memory_format=torch.channels_last))

    verdict = checked(training, route(training.job, training.model, channels_last), ROUNDING)
    assert verdict.ok and verdict.allowed > 1e-3, verdict


GPU = torch.device("cuda", 0)
AMPERE: dict[str, Any] = {"hip": False, "capability": [8, 0], "tf32": False, "cudnn_tf32": True}


@pytest.mark.parametrize(
    ("model", "device", "settings", "expected"),
    [
        (nn.Conv2d(1, 1, 1), GPU, {}, True),
        (nn.Linear(1, 1), GPU, {}, False),
        (nn.Linear(1, 1), GPU, {"tf32": True}, True),
        (nn.Conv2d(1, 1, 1), GPU, {"cudnn_tf32": False}, False),
        (nn.Conv2d(1, 1, 1), GPU, {"cudnn_tf32": None}, False),
        (nn.Conv2d(1, 1, 1), GPU, {"capability": [7, 5]}, False),
        (nn.Conv2d(1, 1, 1), GPU, {"hip": True}, False),
        (nn.Conv2d(1, 1, 1).double(), GPU, {"tf32": True}, False),
        (nn.Conv2d(1, 1, 1), torch.device("cpu"), {"tf32": True}, False),
    ],
)
def test_products_are_tf32s_where_the_gpu_knows_it_and_torch_allows_it(
    model: nn.Module, device: torch.device, settings: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shadow_step, "device_now", lambda index: AMPERE | settings)
    assert computes_in_tf32(model, device) is expected


@pytest.mark.parametrize(("tf32", "ok"), [(True, True), (False, False)])
def test_a_model_whose_products_are_tf32s_is_judged_by_their_rounding(
    tf32: bool, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another layout lets cuDNN take another kernel, which may round to TF32 or not."""
    monkeypatch.setattr(_shadow_step, "computes_in_tf32", lambda model, device: tf32)
    training = trained(ConvNet)
    rounded = scaled(training.model.head.weight, 1 + 2.0**-13)
    assert checked(training, rounded, ROUNDING).ok is ok
    assert not checked(training, scaled(training.model.head.weight, 1.01), ROUNDING).ok


class InTf32(ConvNet):
    """Its gradients are half a per cent off where TF32 is allowed, and its outputs are the same."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = super().forward(images)
        if torch.backends.cudnn.allow_tf32:
            found.register_hook(lambda gradient: gradient * 1.005)
        return found


@pytest.mark.parametrize(("by", "ok"), [(1.01, True), (1.03, False)])
def test_what_tf32_changes_in_a_model_is_measured_and_bounds_what_another_engine_may(
    by: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of a ReLU that are on or off by its rounding move gradients by per cents, outputs hardly."""
    monkeypatch.setattr(_shadow_step, "computes_in_tf32", lambda model, device: True)
    training = trained(InTf32)

    def other_engine(call: Any, args: Any, kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        found.register_hook(lambda gradient: gradient * by)
        return found

    verdict = checked(training, route(training.job, training.model, other_engine), ROUNDING)
    assert verdict.ok is ok, verdict
    assert verdict.reason.endswith("allowed by what the script's own TF32 changes")
    assert verdict.allowed == pytest.approx(0.015, rel=0.02)
    assert torch.backends.cudnn.allow_tf32
    assert not checked(training, scaled(training.model.head.weight, 1.01), ROUNDING).ok, "by the outputs"


def test_an_engine_in_tf32_in_place_of_one_that_was_not_only_rounds_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200 gradients of eight channels moved by 1.5 % where the new layout had cuDNN take TF32, which
    it had not in the old one: the script's own passes show nothing of it."""
    monkeypatch.setattr(_shadow_step, "computes_in_tf32", lambda model, device: True)
    training = trained(ConvNet)

    def by_tf32(call: Any, args: Any, kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        if torch.backends.cudnn.allow_tf32:
            found.register_hook(lambda gradient: gradient * 1.015)
        return found

    verdict = checked(training, route(training.job, training.model, by_tf32), ROUNDING)
    assert verdict.ok, verdict
    assert verdict.reason.endswith("another order of the samples, without TF32")


# -- what is caught


def half_stale(training: Training) -> Any:
    stale = copy.deepcopy(training.model)
    return route(training.job, training.model, lambda call, args, kwargs: stale(*args[1:], **kwargs))


def flipped_mask(training: Training) -> Any:
    @contextmanager
    def flipped() -> Iterator[None]:
        mask = training.model.mask
        training.model.mask = mask.T.contiguous()
        yield
        training.model.mask = mask

    return flipped()


def other_dropout(training: Training) -> Any:
    def without_the_state(call: Any, args: Any, kwargs: Any) -> Any:
        torch.rand(1)
        return call(*args, **kwargs)

    return route(training.job, training.model, without_the_state)


def statistics_twice(training: Training) -> Any:
    def twice(call: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            call(*args, **kwargs)
        return call(*args, **kwargs)

    return route(training.job, training.model, twice)


BROKEN = [
    (ConvNet, lambda t: scaled(t.model.head.weight, 1.001), (EXACT, ROUNDING)),
    (ConvNet, lambda t: scaled(t.model.body[3].weight, 1.001), (EXACT, ROUNDING)),
    (ConvNet, statistics_twice, (EXACT, ROUNDING)),
    (ConvNet, other_dropout, (EXACT, ROUNDING)),
    (ConvNet, lambda t: scaled(t.model.head.weight, -1), (EXACT, ROUNDING, PRECISION)),
    (Transformer, lambda t: scaled(t.model.head.weight, 1.001), (EXACT, ROUNDING)),
    (Transformer, flipped_mask, (EXACT, ROUNDING, PRECISION)),
    (Transformer, other_dropout, (EXACT, ROUNDING)),
    (Transformer, half_stale, (EXACT, ROUNDING, PRECISION)),
]


@pytest.mark.parametrize(
    ("kind", "broken", "safety"),
    [pytest.param(k, b, s, id=f"{i}-{s.value}") for i, (k, b, all_) in enumerate(BROKEN) for s in all_],
)
def test_a_broken_action_is_caught(kind: Any, broken: Any, safety: Safety) -> None:
    training = trained(kind, dropout=0.1 if broken is other_dropout else 0.0)
    applied = broken(training)
    for _ in range(3):
        training.step()  # stale weights are stale by now
    verdict = checked(training, applied, safety)
    assert verdict.checked and not verdict.ok, verdict


def test_values_that_are_not_finite_are_caught() -> None:
    training = trained(ConvNet)
    verdict = checked(training, scaled(training.model.head.weight, float("inf")), PRECISION)
    assert not verdict.ok and "not finite" in verdict.reason


def test_an_action_that_raises_is_caught() -> None:
    training = trained(ConvNet)

    def fails(call: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError("no kernel for this layout")

    verdict = checked(training, route(training.job, training.model, fails), EXACT)
    assert verdict.reason == (
        "with the action the step fails: NotImplementedError: no kernel for this layout"
    )
    assert not verdict.ok


# -- training does not notice


def everything(training: Training) -> list[Any]:
    """What a check could have changed."""
    tensors = [*training.model.parameters(), *training.model.buffers()]
    return [
        [(id(tensor), tensor._version, tensor.tolist()) for tensor in tensors],
        [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in training.model.parameters()],
        [{k: v for k, v in vars(m).items() if k != "_modules"} for m in training.model.modules()],
        copy.deepcopy(training.optimizer.state_dict()),
        training.scheduler.state_dict(),
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        (training.losses, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()),
    ]


@MODELS
@pytest.mark.parametrize("safety", [EXACT, ROUNDING, PRECISION])
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.extended), 0.1])
def test_training_goes_on_bit_for_bit_after_checks(kind: Any, safety: Safety, dropout: float) -> None:
    def run(check: bool) -> list[Any]:
        training = trained(kind, steps=1, dropout=dropout)
        fired: list[int] = []
        training.model.head.weight.register_hook(lambda gradient: fired.append(1))
        training.model.head.weight.register_post_accumulate_grad_hook(lambda p: fired.append(2))
        for _ in range(3):
            if check:
                before = everything(training)
                checked_now(training, safety)
                after = everything(training)
                assert str(after) == str(before)
            training.step()
        return [
            training.losses,
            fired,
            getattr(training.model, "calls", 0),
            [value.tolist() for value in training.model.state_dict().values()],
            torch.get_rng_state().tolist(),
        ]

    assert run(check=True) == run(check=False)


def checked_now(training: Training, safety: Safety) -> None:
    assert compare_gradients(training.job, autocast_at_root(training), safety).checked
    assert compare_update(training.job, fused(training.optimizer), safety).checked


@MODELS
def test_the_hooks_take_no_notice_of_a_check(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters())
    with measured(FakeClock()) as recorder:
        recorder.inputs = {}
        job = Job(
            models=[model],
            optimizers=[optimizer],
            inputs=recorder.inputs,
            routes=recorder.routes,
            unmeasured=recorder.unmeasured,
        )
        verdicts: list[Verdict] = []

        def boundary() -> None:
            if recorder.steps >= 1:
                verdicts.append(compare_gradients(job, nullcontext(), EXACT))
                verdicts.append(compare_update(job, nullcontext(), EXACT))

        recorder.on_boundary = boundary
        with watched(job):
            for _ in range(5):
                inputs, target = model.batch()
                output = model(inputs)
                nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        recorder.finish()
        assert [verdict.ok for verdict in verdicts] == [True] * 6
        assert recorder.steps == 5
        assert recorder.backward_passes == 5
        assert not recorder.notes


# -- optimizers


@contextmanager
def setting(optimizer: torch.optim.Optimizer, **values: Any) -> Iterator[None]:
    group = optimizer.param_groups[0]
    before = {name: group[name] for name in values}
    group.update(values)
    yield
    group.update(before)


OPTIMIZERS = pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])


@OPTIMIZERS
def test_a_fused_step_only_rounds_differently(kind: Any) -> None:
    training = trained(ConvNet, optimizer=kind)
    verdict = compare_update(training.job, fused(training.optimizer), ROUNDING)
    assert verdict.ok and verdict.checked, verdict


def test_a_fused_step_of_sgd_is_exact() -> None:
    training = trained(ConvNet, optimizer=torch.optim.SGD)
    assert compare_update(training.job, fused(training.optimizer), EXACT).ok


BROKEN_STEPS: list[dict[str, Any]] = [
    {"lr": 1.001e-3},
    {"weight_decay": 0.02},
    {"betas": (0.9, 0.9991)},
    {"eps": 1e-6},
    {"maximize": True},
]


@pytest.mark.parametrize("change", BROKEN_STEPS, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("cleared", [False, True], ids=["gradients", "cleared"])
def test_a_broken_step_is_caught(change: dict[str, Any], cleared: bool) -> None:
    training = trained(ConvNet)
    training.optimizer.param_groups[0]["lr"] = 1e-3
    if cleared:
        training.optimizer.zero_grad()
    for safety in (EXACT, ROUNDING):
        verdict = compare_update(training.job, setting(training.optimizer, **change), safety)
        assert verdict.checked and not verdict.ok, verdict


def test_an_optimizer_that_is_not_torchs_own_is_left_alone() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise AssertionError("never called")

    model = nn.Linear(2, 2)
    verdict = compare_update(Job(optimizers=[Own(model.parameters())]), nullcontext(), EXACT)
    assert not verdict.checked and "Own" in verdict.reason
