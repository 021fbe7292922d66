"""What is kept of training before a trial, and that it comes back to the bit; and the losses that tell."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import traceback
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diagnose.kernels._optimizer_8bit import AdamW8bit
from torch import nn
from torch.utils.checkpoint import checkpoint

from diagnose.actions import _snapshot
from diagnose.actions._losses import MOST_UNREAD, Losses
from diagnose.actions._snapshot import Snapshot
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from tests.fakes import measured, one_step

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, history_size=3, max_iter=2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


def training(kind: str = "adamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).train()
    model.register_buffer("steps", torch.tensor(0))
    model.register_buffer("shared", torch.randn(1, 8).expand(4, 8), persistent=False)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, Job(models=[model], optimizers=[optimizer])


def step(model, optimizer, factor: float = 1.0):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4) * random.random() * np.random.rand()).pow(2).mean() * factor
        loss.backward()
        return loss

    model.steps += 1
    optimizer.step(closure)


def everything(model, optimizer) -> list[bytes]:
    def flat(value):
        if isinstance(value, torch.Tensor):
            yield value.detach().numpy().tobytes()
        elif isinstance(value, dict):
            for key in value:
                yield from flat(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                yield from flat(each)
        else:
            yield repr(value).encode()

    return [
        *flat(dict(model.state_dict())),
        *flat(optimizer.state_dict()["state"]),
        *flat([torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]),
    ]


@pytest.mark.parametrize("turns", [False, True])
def test_moments_of_one_byte_come_back_to_the_bit_also_where_the_weight_lies_otherwise_by_then(turns):
    """A scale is of codes that lie together in memory."""
    torch.manual_seed(0)
    model = nn.Conv2d(300, 4, 3)
    optimizer = AdamW8bit(model.parameters())
    scale_C = torch.logspace(0, 3, 300).view(1, 300, 1, 1)

    def coded_step() -> list[torch.Tensor]:
        model.weight.grad = torch.randn(4, 300, 3, 3) * scale_C
        optimizer.step()
        return shown()

    def shown() -> list[torch.Tensor]:
        state = optimizer.state_dict()["state"][0]
        return [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]

    before = coded_step()
    codes = optimizer.state[model.weight]["exp_avg_codes"]
    snapshot = Snapshot(Job(models=[model], optimizers=[optimizer]))
    if turns:
        model.weight.data = model.weight.data.to(memory_format=torch.channels_last)
    coded_step()
    snapshot.restore(Job(models=[model], optimizers=[optimizer]))
    assert all(torch.equal(*pair) for pair in zip(shown(), before, strict=True))
    assert (optimizer.state[model.weight]["exp_avg_codes"] is codes) is not turns
    coded_step()
    assert optimizer.state[model.weight]["exp_avg_codes"].stride() == model.weight.stride()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 5])
def test_all_comes_back_to_the_bit_and_training_repeats_itself(kind, steps_before):
    model, optimizer, job = training(kind)
    for _ in range(steps_before):
        step(model, optimizer)
    snapshot, before = Snapshot(job), everything(model, optimizer)
    for _ in range(4):
        step(model, optimizer)
    once = everything(model, optimizer)
    for _ in range(3):
        step(model, optimizer, factor=float("nan"))
    parameters = list(model.parameters())
    snapshot.check()
    snapshot.restore(job)
    assert everything(model, optimizer) == before
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    for _ in range(4):
        step(model, optimizer)
    assert everything(model, optimizer) == once
    snapshot.restore(job)
    assert everything(model, optimizer) == before, "a snapshot is not used up"


def test_other_optimizers_state_than_was_there_is_gone():
    model, optimizer, job = training()
    snapshot = Snapshot(job)
    step(model, optimizer)
    snapshot.restore(job)
    assert dict(optimizer.state) == {}


def test_a_checkpoint_loaded_since_is_overwritten():
    model, optimizer, job = training()
    step(model, optimizer)
    snapshot, before = Snapshot(job), everything(model, optimizer)
    other, theirs, _ = training()
    step(other, theirs)
    step(other, theirs)
    optimizer.load_state_dict(theirs.state_dict())
    model.load_state_dict(other.state_dict())
    snapshot.restore(job)
    assert everything(model, optimizer)[:-3] == before[:-3]


def test_the_scale_comes_back_and_the_learning_rate_goes_on():
    model, optimizer, job = training("sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    snapshot = Snapshot(job, [scaler])
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert scaler.get_scale() == 32.0
    snapshot.restore(job)
    assert scaler.get_scale() == 8.0
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25


def test_random_numbers_go_on_where_an_epoch_has_begun_since():
    """Turned back, they would shuffle the next epoch as they shuffled this one."""
    _, _, job = training()
    snapshot = Snapshot(job)
    job.epochs_begun += 1
    torch.rand(1)
    state = torch.get_rng_state()
    snapshot.restore(job)
    assert torch.equal(torch.get_rng_state(), state)


def test_too_little_memory_is_a_refusal_before_anything_is_copied(monkeypatch):
    _, _, job = training()
    monkeypatch.setattr(_snapshot, "available_bytes", lambda: 100)
    with pytest.raises(CannotApply, match="weights and optimizer state take 0 MiB, and 0 MiB may be used"):
        Snapshot(job)


def test_a_parameter_of_another_shape_refuses_before_anything_is_changed():
    model, _, job = training()
    snapshot = Snapshot(job)
    model[0].weight.data = torch.zeros(9, 4)
    with pytest.raises(CannotApply, match=r"shape \[8, 4\] has come to be one of \[9, 4\]"):
        snapshot.check()


def test_it_keeps_nothing_that_the_script_is_done_with():
    model, optimizer, job = training()
    step(model, optimizer)
    snapshot = Snapshot(job)
    alive = [weakref.ref(each) for each in (optimizer, model[0].weight)]
    job.models, job.optimizers = [], []
    del model, optimizer
    gc.collect()  # what torch imports at a first step leaves it in a cycle
    assert [each() for each in alive] == [None, None]
    with pytest.raises(CannotApply, match="the script has done with what it had trained"):
        snapshot.check()


def called(function, *args):
    function(*args)


@contextmanager
def noting():
    losses = Losses(called)
    with losses.noted():
        yield losses


class OnGpu(torch.Tensor):
    """Says that it is there, and is like a plain tensor else."""

    device = torch.device("cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self):
        return super().detach().as_subclass(OnGpu)


def test_a_loss_is_fetched_from_a_gpu_by_a_copy_that_is_not_the_scripts(monkeypatch):
    arrival = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: arrival)
    loss = torch.ones(3, requires_grad=True).sum().as_subclass(OnGpu)
    ticks = itertools.count().__next__
    with measured(ticks, "copy-to-device") as recorder, one_step(recorder) as step, noting() as losses:
        loss.backward()
        assert losses.step_ended() == [3.0]
    assert set(step.times) == {"gap_after_rest"}


def test_each_steps_loss_is_noted_and_told_once():
    weight = torch.ones(3, requires_grad=True)
    with noting() as losses:
        (weight.sum() * 2).backward()
        assert losses.step_ended() == [6.0]
        (weight.sum() * 2).backward()
        (weight.sum() * 4).backward()
        assert losses.step_ended() == [9.0], "the mean of what the step accumulates"
        assert losses.step_ended() == []


def test_a_scaled_loss_is_noted_as_it_was_before():
    weight = torch.ones(3, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with noting() as losses:
        scaler.scale(weight.sum()).backward()
        assert losses.step_ended() == [3.0]
        assert list(losses.scalers) == [scaler]


def test_a_backward_pass_within_another_is_part_of_it():
    weight = torch.ones(3, requires_grad=True)
    with noting() as losses:
        inner = checkpoint(lambda x: (x * 2).sum(), weight, use_reentrant=True)
        (inner + 1).backward()
        assert losses.step_ended() == [7.0]


def test_what_begins_at_no_single_number_is_not_noted():
    weight = torch.ones(3, requires_grad=True)
    with noting() as losses:
        (weight * 2).backward(torch.ones(3))
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(weight.sum()))
        torch.autograd.backward(tensors=[weight.sum()])
        assert losses.step_ended() == [3.0]


def test_an_error_of_the_backward_pass_is_the_scripts_and_the_next_is_noted():
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()
    with noting() as losses:
        loss.backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.detach().backward()
        losses.step_ended()
        weight.sum().backward()
        assert losses.step_ended() == [3.0]


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 adds a frame again when it is re-raised"
)
def test_an_error_of_a_scaler_is_told_as_without_us():
    def fail():
        torch.amp.GradScaler("cpu").scale(3)

    def places(error: BaseException) -> list[str]:
        return [each.name for each in traceback.extract_tb(error.__traceback__)]

    with pytest.raises(ValueError) as alone:
        fail()
    with noting(), pytest.raises(ValueError) as noted:
        fail()
    assert places(noted.value) == places(alone.value)


def test_no_loss_is_kept_alive_and_unread_ones_are_limited():
    weight = torch.ones(3, requires_grad=True)
    with noting() as losses:
        for _ in range(MOST_UNREAD + 5):
            losses._note(weight.sum().detach())
            losses._unread.append(losses._step)
            losses._step = []
        assert len(losses.step_ended()) == MOST_UNREAD
