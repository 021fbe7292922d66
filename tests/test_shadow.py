"""The numerics check: what it lets pass, what it catches, and that training does not notice it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
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
from tests.fakes import FakeClock, measured

EXACT, ROUNDING, PRECISION = Safety.EXACT, Safety.ROUNDING, Safety.PRECISION
BATCH = 16


class ConvNet(nn.Module):
    """A small network for images, with batch norm, and dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 10)
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.dropout(self.body(images).mean((2, 3))))

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(BATCH, 3, 16, 16), torch.randint(10, (BATCH,))


class Transformer(nn.Module):
    """A small language model with a causal mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)
        self.register_buffer("mask", torch.triu(torch.full((12, 12), float("-inf")), diagonal=1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens), mask=self.mask))

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(50, (BATCH, 13))
        return tokens[:, :-1], tokens[:, 1:]


MODELS = pytest.mark.parametrize("kind", [ConvNet, Transformer])


class Training:
    """A loop as scripts have it; the check comes between two steps."""

    def __init__(self, model: Any, *, autocast: bool = False, optimizer: Any = torch.optim.AdamW) -> None:
        self.model, self.autocast = model, autocast
        self.optimizer = optimizer(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.losses: list[float] = []
        self.job = Job(models=[model], optimizers=[self.optimizer])

    def step(self) -> None:
        inputs, target = self.model.batch()
        self.optimizer.zero_grad()
        self.job.inputs[id(self.model)] = ((inputs,), {})
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = called(self.job, self.model, inputs)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())


def called(job: Job, model: nn.Module, *args: Any) -> Any:
    """Calls a model as the hooks let the script call it: through its routes."""

    def through(index: int) -> Callable[..., Any]:
        routes = job.routes.get(id(model), [])
        if index == len(routes):
            return lambda model, *args, **kwargs: model(*args, **kwargs)
        return lambda *args, **kwargs: routes[index](through(index + 1), args, kwargs)

    return through(0)(model, *args)


def trained(kind: Any, *, steps: int = 3, dropout: float = 0.0, **options: Any) -> Training:
    """Some steps of training, all remembered."""
    torch.manual_seed(0)
    training = Training(kind(dropout), **options)
    with watched(training.job):
        for _ in range(steps):
            training.step()
    return training


def checked(training: Training, applied: Any, safety: Safety) -> Verdict:
    """One more step, and then the check."""
    with watched(training.job):
        training.step()
        return compare_gradients(training.job, applied, safety)


@contextmanager
def route(job: Job, model: nn.Module, change: Any) -> Iterator[None]:
    job.routes.setdefault(id(model), []).append(change)
    try:
        yield
    finally:
        job.routes[id(model)].remove(change)


@contextmanager
def scaled(parameter: torch.Tensor, by: float) -> Iterator[None]:
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(by)
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(kept)


def autocast_at_root(training: Training) -> Any:
    def change(call: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args, **kwargs).float()

    return route(training.job, training.model, change)


# -- what passes


@MODELS
def test_doing_nothing_is_equal_bit_for_bit(kind: Any) -> None:
    verdict = checked(trained(kind, dropout=0.1), nullcontext(), EXACT)
    assert verdict == Verdict(ok=True, yardstick="bit for bit", reason="equal bit for bit")


def test_another_layout_in_memory_is_rounding_and_not_exact() -> None:
    def channels_last(call: Any, args: Any, kwargs: Any) -> Any:
        return call(args[0], args[1].to(memory_format=torch.channels_last))

    training = trained(ConvNet)
    verdict = checked(training, route(training.job, training.model, channels_last), ROUNDING)
    assert verdict.ok and 0 < verdict.error < verdict.allowed < 1e-3, verdict
    assert verdict.yardstick == "another order of the samples"
    assert not checked(training, route(training.job, training.model, channels_last), EXACT).ok


@MODELS
def test_bfloat16_is_precision_and_not_rounding(kind: Any) -> None:
    training = trained(kind)
    verdict = checked(training, autocast_at_root(training), PRECISION)
    assert verdict.ok and verdict.error > 1e-3, verdict
    assert verdict.yardstick == "a tenth of what another mini-batch changes"
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
    assert verdict.yardstick == "what the script's own TF32 changes"
    assert verdict.allowed == pytest.approx(0.015, rel=0.02)
    assert torch.backends.cudnn.allow_tf32
    assert not checked(training, scaled(training.model.head.weight, 1.01), ROUNDING).ok, "by the outputs"


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


# -- what cannot be checked


class Momentum(nn.Module):
    """Moves its own key weights in every call, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.9).add_(self.query.weight, alpha=0.1)
        return self.query(rows) * self.key(rows)


def test_a_model_that_writes_its_parameters_is_not_called() -> None:
    model = Momentum()
    before = copy.deepcopy(model.state_dict())
    job = Job(models=[model], inputs={id(model): ((torch.randn(3, 4),), {})})
    verdict = compare_gradients(job, nullcontext(), EXACT)
    assert (verdict.ok, verdict.checked) == (False, False)
    assert verdict.reason == (
        "numerics cannot be checked: the model writes to its own parameters while it is called"
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Bank:
    """What a model remembers, beyond torch's modules."""

    def __init__(self) -> None:
        self.rows = torch.zeros(8, 4)
        self.kept: dict[str, list[int]] = {"sizes": []}


class Remembering(nn.Module):
    """Changes something in every call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.bank = what, Bank()
        self.nested = {"counts": {"calls": 0}}
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.what == "rows":
            self.bank.rows[0] = rows.detach()[0]
        elif self.what == "sizes":
            self.bank.kept["sizes"].append(len(rows))
        elif self.what == "counts":
            self.nested["counts"]["calls"] += 1
        mask = torch.tensor([1.0, 1.0, 0.0, 1.0])  # its own may be written to
        mask.mul_(2).view(2, 2)[0].add_(1)
        return self.layer(rows) * mask


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("rows", "each call of the model changes bank.rows, which could not be put back"),
        ("sizes", "each call of the model changes bank.kept.sizes, which could not be put back"),
        ("counts", "each call of the model changes nested.counts, which could not be put back"),
        ("", ""),
    ],
)
def test_a_model_that_changes_what_it_holds_beyond_modules_is_not_called_again(what: str, reason: str):
    model = Remembering(what)
    inputs = torch.randn(3, 4)
    job = Job(models=[model], inputs={id(model): ((inputs,), {})})
    with watched(job):
        called(job, model, inputs).sum().backward()
        before = (model.bank.rows.clone(), copy.deepcopy([model.bank.kept, model.nested]))
        version = model.bank.rows._version
        verdict = compare_gradients(job, nullcontext(), EXACT)
    assert (verdict.ok, verdict.checked) == (not what, not what), verdict
    assert not reason or verdict.reason == f"numerics cannot be checked: {reason}"
    assert torch.equal(before[0], model.bank.rows) and model.bank.rows._version == version
    assert before[1] == [model.bank.kept, model.nested]


def test_a_call_that_was_not_watched_is_stopped_before_it_writes_to_another_tensor() -> None:
    model = Remembering("rows")
    job = Job(models=[model], inputs={id(model): ((torch.randn(3, 4),), {})})
    verdict = compare_gradients(job, nullcontext(), EXACT)
    assert verdict.reason == (
        "numerics cannot be checked: the model writes to a tensor that could not be put back while it is"
        " called"
    )
    assert not model.bank.rows.any()


class Scaled(nn.Module):
    """Returns a parameter beside its output, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(rows), self.scale


def test_the_watch_leaves_no_hook_on_a_parameter_that_a_model_returns() -> None:
    model = Scaled()
    inputs = torch.randn(3, 4)
    job = Job(models=[model], inputs={id(model): ((inputs,), {})})
    with watched(job):
        rows, scale = called(job, model, inputs)
        (rows * scale).sum().backward()
        assert not model.scale._backward_hooks
        assert compare_gradients(job, nullcontext(), EXACT).ok
        assert not compare_gradients(job, scaled(model.layer.weight, 1.001), ROUNDING).ok


class Halves(nn.Module):
    """Returns two views of one result, of which a loss may take only one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(rows).chunk(2, -1)


def test_a_result_that_the_loss_leaves_out_gets_no_gradient_and_harms_nothing() -> None:
    model, inputs = Halves(), torch.randn(3, 4)
    job = Job(models=[model], inputs={id(model): ((inputs,), {})})
    with watched(job):
        called(job, model, inputs)[0].sum().backward()
        assert compare_gradients(job, nullcontext(), EXACT).ok
        assert not compare_gradients(job, scaled(model.layer.weight, 1.001), ROUNDING).ok


HEARD: list[torch.Tensor] = []


class Telling(nn.Module):
    """Leaves what it computed in a list beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        HEARD.append(self.layer(rows))
        return HEARD[-1].tanh()


@pytest.mark.parametrize("told", ["by a hook", "by a hook backwards", "by itself"])
def test_a_model_whose_calls_are_heard_elsewhere_is_not_called_again(told: str) -> None:
    HEARD.clear()
    model, inputs = Telling() if told == "by itself" else nn.Linear(4, 4), torch.randn(3, 4)
    if told == "by a hook":
        model.register_forward_hook(lambda module, given, result: HEARD.append(result))
    elif told == "by a hook backwards":
        model.register_full_backward_hook(lambda module, into, out: HEARD.append(out[0]))
    job = Job(models=[model], inputs={id(model): ((inputs,), {})})
    with watched(job):
        called(job, model, inputs).sum().backward()
        verdict = compare_gradients(job, nullcontext(), EXACT)
    assert not verdict.checked and ("would hear" in verdict.reason or "HEARD" in verdict.reason), verdict
    assert len(HEARD) == 1


def test_hooks_of_torch_itself_are_called_again() -> None:
    model, inputs = nn.utils.spectral_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    job = Job(models=[model], inputs={id(model): ((inputs,), {})})
    with watched(job):
        called(job, model, inputs).sum().backward()
        assert compare_gradients(job, nullcontext(), EXACT).ok


class Packed(nn.Module):
    """Takes sequences sorted by their lengths, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True)
        return self.layer(packed)[1][0]


class Graphs(nn.Module):
    """Multiplies by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(edges, self.layer(rows))


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (Packed, (torch.randn(3, 5, 4), torch.tensor([5, 3, 2]))),
        (Graphs, (torch.randn(3, 4), torch.eye(3).to_sparse())),
    ],
)
def test_inputs_that_know_no_other_order_are_judged_by_a_fixed_bound(model: Any, given: Any) -> None:
    torch.manual_seed(0)
    job = Job(models=[model := model()], inputs={})
    job.inputs[id(model)] = (given, {})
    first = next(model.parameters())
    with watched(job):
        called(job, model, *given).sum().backward()
        assert compare_gradients(job, nullcontext(), EXACT).ok
        assert compare_gradients(job, scaled(first, 1 + 1e-7), ROUNDING).ok
        assert not compare_gradients(job, scaled(first, 1.001), ROUNDING).ok


def test_what_cannot_be_computed_twice_is_not_checked_and_no_error() -> None:
    model, inputs = nn.Linear(4, 4), torch.randn(3, 4)
    job = Job(models=[model], inputs={id(model): ((inputs, "no such argument"), {})})
    verdict = compare_gradients(job, nullcontext(), EXACT)
    assert not verdict.checked and verdict.reason
    table = nn.Embedding(4, 2, sparse=True)
    job = Job(optimizers=[torch.optim.SparseAdam(table.parameters())])
    verdict = compare_update(job, nullcontext(), EXACT)
    assert not verdict.checked and "sparse" in verdict.reason.lower()


def changed_inputs(training: Training) -> None:
    training.job.inputs[id(training.model)][0][0].zero_()


def freed_inputs(training: Training) -> None:
    training.job.inputs[id(training.model)][0][0].untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (changed_inputs, "the script has changed the model's last inputs since"),
        (freed_inputs, "the script has freed the model's last inputs"),
        (lambda training: training.model.eval(), "the model is not in training mode now"),
        (lambda training: training.job.inputs.clear(), "no call of a model with gradients was seen"),
        (
            lambda training: training.model.head.weight.data.fill_(float("nan")),
            "the script's own outputs or gradients are not finite at this step",
        ),
    ],
)
def test_where_nothing_can_be_checked_the_verdict_says_why(spoil: Any, reason: str) -> None:
    training = trained(ConvNet)
    with watched(training.job):
        training.step()
        spoil(training)
        verdict = compare_gradients(training.job, nullcontext(), EXACT)
    assert (verdict.ok, verdict.checked) == (False, False)
    assert verdict.reason == f"numerics cannot be checked: {reason}"


def test_without_the_last_gradients_made_up_ones_do() -> None:
    training = trained(ConvNet)
    applied = scaled(training.model.head.weight, 1.001)
    assert compare_gradients(training.job, nullcontext(), EXACT).ok
    assert not compare_gradients(training.job, applied, ROUNDING).ok


def test_a_default_device_that_the_script_has_set_gets_none_of_the_checks_numbers() -> None:
    def channels_last(call: Any, args: Any, kwargs: Any) -> Any:
        return call(args[0], args[1].to(memory_format=torch.channels_last))

    training = trained(ConvNet)
    training.optimizer.zero_grad()
    applied = route(training.job, training.model, channels_last)
    with torch.device("meta"):
        gradients = compare_gradients(training.job, applied, ROUNDING)
        update = compare_update(training.job, fused(training.optimizer), ROUNDING)
    assert gradients.ok and gradients.yardstick == "another order of the samples", gradients
    assert update.ok, update


def test_the_gradients_are_those_of_the_scripts_own_loss() -> None:
    training = trained(ConvNet)
    with watched(training.job):
        training.step()
        (watch,) = training.job.routes[id(training.model)]
        inputs = training.job.inputs[id(training.model)][0][0]
        (kept,) = watch.call.gradients.values()  # type: ignore[attr-defined]
    assert kept.shape == (BATCH, 10)
    assert inputs.shape[0] == BATCH
    assert torch.allclose(kept.sum(1), torch.zeros(BATCH), atol=1e-6), "as cross entropy's rows do"
    assert training.job.routes == {}


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
@pytest.mark.parametrize("dropout", [0.0, 0.1])
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
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = [(group["fused"], group["foreach"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    yield
    for group, (was_fused, was_foreach) in zip(optimizer.param_groups, before, strict=True):
        group["fused"], group["foreach"] = was_fused, was_foreach


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
