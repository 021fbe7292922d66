"""Calls of a model behind one node of the graph, or in pieces: to autograd and to hooks as one call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._boundary import Segment
from diagnose.actions._pieces import Pieces
from diagnose.actions._routes import routed
from diagnose.core.job import Job
from tests.changed_training import Net, same, train


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_call_behind_one_node_is_exact(accumulate: int, dropout: float) -> None:
    def model() -> Net:
        return Net(norm=True, dropout=dropout)

    def bounded(job: Job) -> AbstractContextManager[None]:
        return routed(job, job.models[0], lambda call, args, kwargs: Segment(call, args, kwargs).run())

    assert same(train(model, bounded, accumulate=accumulate), train(model, accumulate=accumulate))


def behind_a_node(model: nn.Module, *args: Any) -> Any:
    return Segment(lambda model, *args: model(*args), (model, *args), {}).run()


def in_three_pieces(model: nn.Module, *args: Any) -> Any:
    return Pieces(lambda model, *args: model(*args), (model, *args), {}, 3).run()


WAYS = pytest.mark.parametrize("way", [behind_a_node, in_three_pieces])


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@WAYS
def test_inputs_get_their_gradient(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    ours, plain = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    way(model, (ours * 2)).square().sum().backward()
    model(plain * 2).square().sum().backward()
    assert torch.allclose(ours.grad, plain.grad, rtol=1e-12)  # type: ignore[arg-type]


@WAYS
def test_a_gradient_penalty_goes_through_twice(way: Any) -> None:
    def penalty(call: Any) -> list[torch.Tensor]:
        model, rows = net(), torch.ones(7, 3, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(call(model, rows).sum(), rows, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for ours, plain in zip(penalty(way), penalty(lambda model, rows: model(rows)), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-12)


@WAYS
def test_a_graph_that_is_kept_can_be_gone_through_again(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    output = way(model, rows)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    output = model(rows)
    (output.sum() + output.square().sum()).backward()
    assert all(torch.allclose(o, p.grad, rtol=1e-12) for o, p in zip(ours, model.parameters(), strict=True))


@WAYS
def test_hooks_on_parameters_run_once(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    fired: list[str] = []
    model[0].weight.register_hook(lambda gradient: fired.append("hook") or gradient * 0.5)  # type: ignore[func-returns-value]
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append("after"))
    way(model, rows).sum().backward()
    ours = model[0].weight.grad.clone()
    assert fired == ["hook", "after"]
    model.zero_grad()
    model(rows).sum().backward()
    assert torch.allclose(ours, model[0].weight.grad, rtol=1e-12)


@WAYS
def test_outputs_may_be_changed_in_place(way: Any) -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    output = way(model, rows)
    output.mul_(2)
    output[0] = 0
    output.sum().backward()
    ours = model[0].weight.grad.clone()
    model.zero_grad()
    output = model(rows) * 2
    output[0] = 0
    output.sum().backward()
    assert torch.allclose(ours, model[0].weight.grad, rtol=1e-12)


@WAYS
def test_autocast_is_the_scripts_in_the_second_call_too(way: Any) -> None:
    class Seen(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            output = super().forward(rows)
            types.append(output.dtype)
            return output

    types: list[torch.dtype] = []
    model = Seen(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = way(model, torch.ones(7, 3))
    output.float().sum().backward()
    assert set(types) == {torch.bfloat16}
    assert torch.equal(model.weight.grad, torch.full((2, 3), 7.0)), "no piece is lost to a cached cast"  # type: ignore[arg-type]


@WAYS
def test_inputs_may_be_written_to_before_the_backward_pass(way: Any) -> None:
    class Shifted(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows + 1)  # which keeps the sum, and not the rows

    model, rows = Shifted(3, 2), torch.ones(7, 3)
    output = way(model, rows)
    rows.zero_()
    output.sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 14.0))  # type: ignore[arg-type]


@WAYS
def test_features_kept_by_a_hook_registered_meanwhile_have_their_gradient(way: Any) -> None:
    model, rows, features = net(), torch.randn(7, 3, dtype=torch.float64), []
    model[1].register_forward_hook(lambda module, args, output: features.append(output))

    def gradients(call: Any) -> list[torch.Tensor]:
        model.zero_grad()
        (call(model, rows).sum() + features.pop().square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    for ours, plain in zip(gradients(way), gradients(lambda model, rows: model(rows)), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-12)


def test_parameters_changed_before_the_second_call_are_noticed() -> None:
    model, rows = net(), torch.randn(7, 3, dtype=torch.float64)
    output = in_three_pieces(model, rows)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
