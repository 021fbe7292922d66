"""Micro-batching: a batch in pieces, and the models that do not let it be cut."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._careful import Failure
from diagnose.actions._shadow import compare_gradients
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.micro_batching import MicroBatching
from diagnose.actions.oom_replay import OomReplay
from diagnose.core.trial import Safety
from tests.changed_training import Net, by, difference, job_of, train


@pytest.mark.parametrize("pieces", [2, 4, 5])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_pieces_of_a_batch_only_round_differently(pieces: int, accumulate: int) -> None:
    applied = by(MicroBatching(), pieces)
    left_alone = train(Net, accumulate=accumulate)
    changed = train(Net, applied, accumulate=accumulate)
    assert difference(changed, left_alone) < 1e-13
    assert changed[2:] == left_alone[2:], "random numbers go on as they would"
    assert len(changed[0]) == len(left_alone[0])


def test_pieces_pass_the_numerics_check() -> None:
    job = job_of(Net())
    action = MicroBatching()
    with action.prepare(job, 4) as prepared:
        assert compare_gradients(job, action.apply(job, prepared), Safety.ROUNDING).ok


def test_pieces_save_memory_and_activations_of_one_are_alive() -> None:
    model = Net()
    alive: list[int] = []

    def bytes_kept(pieces: int) -> int:
        kept: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel() * tensor.element_size())
            return tensor

        job = job_of(model)
        action = MicroBatching()
        on = action.apply(job, (pieces, Failure())) if pieces else nullcontext()
        with on, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call = job.routes[id(model)][0] if pieces else None
            rows = torch.randn(240, 8)
            plain = lambda model, rows: model(rows)  # noqa: E731
            call(plain, (model, rows), {}) if call else plain(model, rows)
        alive.append(sum(kept))
        return sum(kept)

    weights = sum(p.numel() * 4 for p in model.parameters()) * 2
    assert bytes_kept(4) - weights < 0.35 * bytes_kept(0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Net(norm=True), "blocks.0.norm is a batch norm"),
        (lambda: Net(dropout=0.1), "blocks.0.dropout is a dropout"),
        (lambda: nn.DataParallel(Net()), "DataParallel spreads each call"),
    ],
)
def test_models_whose_samples_know_of_each_other_are_refused(model: Any, reason: str) -> None:
    with pytest.raises(CannotApply, match=reason):
        MicroBatching().check(job_of(model()))


class Noisy(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows + torch.randn_like(rows))


class Writes(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(rows)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Net(loss=True), "returns a value for the batch as a whole"),
        (lambda: Noisy(8, 8), "draws random numbers"),
        (lambda: Writes(8, 8), "writes to its own parameters"),
    ],
)
def test_what_only_a_call_shows_is_refused_in_preparation(model: Any, reason: str) -> None:
    job = job_of(model())
    before = torch.get_rng_state()
    with pytest.raises(CannotApply, match=reason), MicroBatching().prepare(job, 2):
        pass
    assert torch.equal(torch.get_rng_state(), before)


class Penalized(Net):
    """Notes on itself what the loop adds to its loss."""

    def forward(self, rows: torch.Tensor) -> Any:
        output = super().forward(rows)
        self.penalties = [output["hidden"].abs().mean()]
        return output


class Apart(Net):
    """Likewise, of a part that its output does not need."""

    def forward(self, rows: torch.Tensor) -> Any:
        self.penalty = self.last(self.first(rows)).square().mean()
        return {"logits": rows.detach() @ self.first.weight.T}


class Kept(Net):
    """Gives it to somebody else."""

    features: list[torch.Tensor] = []  # noqa: RUF012 (all share it)

    def forward(self, rows: torch.Tensor) -> Any:
        output = super().forward(rows)
        Kept.features[:] = [output["hidden"].tanh()]
        return output


SCALE = nn.Parameter(torch.ones(4))


class Scaled(nn.Linear):
    """Uses a parameter that is not its own."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * SCALE


def hooked() -> nn.Module:
    model = Net()
    model.blocks[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("action", [MicroBatching(), OomReplay()])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Penalized, "penalties of the model holds a tensor that has a gradient"),
        (Apart, "penalty of the model holds a tensor that has a gradient"),
        (Kept, "something keeps what a call of the model computes inside"),
        (lambda: Scaled(8, 4), "takes a gradient and is none of its parameters"),
        (hooked, "the model has forward hooks"),
    ],
)
def test_a_model_with_gradients_past_inputs_parameters_and_outputs_is_refused(
    action: Action, model: Any, reason: str
) -> None:
    job = job_of(model())
    Kept.features.clear()
    with pytest.raises(CannotApply, match=reason), action.prepare(job, 2):
        pass


@pytest.mark.parametrize("action", [MicroBatching(), OomReplay()])
def test_a_model_that_keeps_its_activations_without_gradients_is_not_refused(action: Action) -> None:
    class Shown(Net):
        """Also leaves rubbish behind."""

        def forward(self, rows: torch.Tensor) -> Any:
            output = super().forward(rows)
            self.shown = output["hidden"].detach()
            circle: list[Any] = [output["hidden"]]
            circle.append(circle)
            return output

    with action.prepare(job_of(Shown()), 2):
        pass
