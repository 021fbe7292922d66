"""Where the numerics check may not look twice: it says why, or finds another way."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._shadow import compare_gradients, compare_update
from diagnose.actions._watch import watched
from diagnose.core.job import Job
from tests.checked_training import (
    BATCH,
    EXACT,
    ROUNDING,
    ConvNet,
    Training,
    called,
    fused,
    route,
    scaled,
    trained,
)


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
    assert gradients.ok and gradients.reason.endswith("another order of the samples"), gradients
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
