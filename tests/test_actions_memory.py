"""Activations that are computed again or kept on the host: exactly, and less of them in memory."""

from __future__ import annotations

import copy
import pickle
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from diagnose.actions import activation_checkpointing, save_on_cpu
from diagnose.actions._block_costs import BlockCost, cheapest, measure_blocks
from diagnose.actions._checkpointed import checkpointed
from diagnose.actions._routes import routed
from diagnose.actions._shadow import compare_gradients
from diagnose.actions._watch import watched
from diagnose.actions.activation_checkpointing import ActivationCheckpointing, blocks_of
from diagnose.actions.base import CannotApply
from diagnose.actions.micro_batching import MicroBatching
from diagnose.actions.save_on_cpu import SaveOnCpu
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from tests.changed_training import Net, by, job_of, same, train

# -- activation checkpointing


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("share", [30, 100])
def test_checkpointing_is_exact(norm: bool, dropout: float, share: int) -> None:
    def model() -> Net:
        return Net(norm=norm, dropout=dropout)

    assert same(train(model, by(ActivationCheckpointing(), share)), train(model))


def test_checkpointing_passes_the_numerics_check_as_exact() -> None:
    job = job_of(Net(norm=True, dropout=0.2))
    action = ActivationCheckpointing()
    with action.prepare(job, 100) as prepared:
        verdict = compare_gradients(job, action.apply(job, prepared), Safety.EXACT)
    assert verdict.ok, verdict


def test_checkpointing_frees_the_bytes_it_predicts() -> None:
    def kept_bytes(model: nn.Module, rows: torch.Tensor) -> int:
        kept: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        tensors = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(rows)
        assert output is not None
        return sum(kept.values())

    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4))
    )
    job = Job(models=[model], inputs={id(model): ((torch.randn(50, 32),), {})})
    blocks = list(model)
    costs = measure_blocks(job, model, blocks)
    before = kept_bytes(model, job.inputs[id(model)][0][0])
    predicted = sum(cost.num_bytes for cost in costs)
    # What surrounds a checkpointed block keeps its inputs: they are not autograd's, and were kept before.
    with checkpointed(blocks):
        after = kept_bytes(model, job.inputs[id(model)][0][0])
    inputs = 4 * 50 * 32 * 4
    assert predicted == 4 * 50 * 128 * 4
    assert before - after in (predicted, predicted + inputs)


def costs_of(*pairs: tuple[int, int]) -> list[BlockCost]:
    return [BlockCost(block=nn.Identity(), num_bytes=b, time_ns=t) for b, t in pairs]


def test_the_cheapest_blocks_that_free_enough_are_chosen() -> None:
    costs = costs_of((100, 50), (60, 10), (60, 15), (5, 100))
    assert cheapest(costs, 100) == costs[1:3]
    assert cheapest(costs, 60) == [costs[1]]
    assert cheapest(costs, 150) == [costs[0], costs[1]]
    assert cheapest(costs, 10_000) == costs
    assert cheapest(costs_of((0, 5)), 10) == []


def test_copies_and_pickles_of_a_checkpointed_model_are_plain() -> None:
    model = Net()
    with checkpointed(model.blocks):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert all(block._compiled_call_impl is None for block in other.blocks)
    with torch.no_grad():
        model.first.weight.zero_()
    assert not torch.equal(copied(torch.ones(1, 8))["logits"], model(torch.ones(1, 8))["logits"])


def test_checkpointing_is_refused_while_there_is_memory() -> None:
    with pytest.raises(CannotApply, match="memory is not short"):
        ActivationCheckpointing().check(job_of(Net(), device="cpu"))


def test_checkpointing_is_refused_for_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "refuse_unless_short", lambda job: None)
    model = Net()
    model.compile()
    with pytest.raises(CannotApply, match="the model is compiled"):
        ActivationCheckpointing().check(job_of(model))


def test_blocks_with_hooks_of_the_script_are_left_alone() -> None:
    model = Net()
    model.blocks[1].up.register_forward_hook(lambda *_: None)
    assert blocks_of(model) == [model.blocks[0], model.blocks[2]]


def test_hooks_that_the_script_registers_while_blocks_are_checkpointed_run_once() -> None:
    model, seen = Net(), []
    with checkpointed(model.blocks):
        model.blocks[1].up.register_forward_pre_hook(lambda *_: seen.append("up"))
        model(torch.ones(2, 8))["logits"].sum().backward()
    assert seen == ["up"]


# -- saved on the CPU


def test_activations_saved_on_the_host_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_on_cpu, "SMALL_BYTES", 1)

    def applied(job: Job) -> AbstractContextManager[None]:
        return routed(job, job.models[0], save_on_cpu.saved_on_host)

    def model() -> Net:
        return Net(norm=True, dropout=0.3)

    assert same(train(model, applied), train(model))


def test_saving_on_the_host_is_refused_on_a_cpu() -> None:
    with pytest.raises(CannotApply, match="in the host's memory already"):
        SaveOnCpu().check(job_of(Net()))


def test_a_run_with_the_check_before_each_action_is_the_run_without() -> None:
    def applied(job: Job) -> AbstractContextManager[None]:
        for action in (MicroBatching(), ActivationCheckpointing()):
            with action.prepare(job, action.values(job)[0]) as prepared:
                assert compare_gradients(job, action.apply(job, prepared), action.safety).ok
        return watched(job)

    assert same(train(Net, applied), train(Net))
