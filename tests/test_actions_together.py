"""Actions under what scripts use besides: compiled models, accelerate, several actions at once."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from diagnose.actions import _autocast
from diagnose.actions._compiled import Compiler
from diagnose.actions._shadow import compare_gradients, compare_update
from diagnose.actions.autocast_bf16 import AutocastBf16
from diagnose.actions.autocast_fp16 import AutocastFp16
from diagnose.actions.base import Action
from diagnose.actions.channels_last import ChannelsLast
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.actions.gc_freeze import GcFreeze
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.regional_compile import RegionalCompile
from diagnose.actions.set_threads import SetThreads
from diagnose.core.job import Job
from diagnose.tuner.installed import Installed
from tests.loops import Rows, begin
from tests.toggled import ConvNet, always, assert_close, images, train, tuned, weights

pytest_plugins = ("tests.compiled",)
pytestmark = pytest.mark.usefixtures("fresh_graphs")


@pytest.mark.parametrize(
    "action, value",
    [(FusedOptimizer(), None), (SetThreads(), torch.get_num_threads() + 1), (GcFreeze(), None)],
)
def test_a_model_that_the_script_compiles_whole_stays_whole(action: Action, value: int | None) -> None:
    ends = []
    for tried in (None, action):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
        with tuned(tried, value=value):
            for _ in range(12):
                compiled(torch.randn(4, 4)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(weights(model))
    assert_close(ends[1], ends[0])


def test_a_converted_model_can_be_compiled_whole() -> None:
    torch.manual_seed(0)
    model = ConvNet().eval()
    image = torch.randn(2, 3, 8, 8)
    expected = model(image)
    job, action = Job(models=[model]), ChannelsLast()
    with action.prepare(job, None) as ready, action.apply(job, ready):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(image), expected)
    torch.testing.assert_close(compiled(image), expected)


def test_an_action_that_is_in_force_once_more_is_no_trace_of_another(monkeypatch: Any) -> None:
    """All are taken back for a measurement and put in again; then one is taken out."""
    monkeypatch.setattr(_autocast, "MIN_RATE", 0.0)  # whatever CPU this is
    monkeypatch.setattr(_autocast, "PROBE_SIZES", (32,))
    model = ConvNet()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), images(2))
    job = Job(models=[model])
    first = Installed("channels-last", ChannelsLast(), job, None)
    first.switch(True)
    second = Installed("autocast-bf16", AutocastBf16(), job, None, lambda: [first])
    for on in (True, False, True):
        first.switch(on)
        second.switch(on)
    second.remove()
    first.remove()
    assert not job.routes


def test_a_loader_that_is_gone_at_the_end_of_the_script_is_no_trace() -> None:
    job = Job()
    batches = begin(job, DataLoader(Rows(16), 2, num_workers=1))
    next(batches)
    first = Installed("loader-prefetch", LoaderPrefetch(), job, 4)
    first.switch(True)
    second = Installed("loader-workers", LoaderWorkers(), job, 2, lambda: [first])
    second.switch(True)
    next(batches)
    job.loaders.clear()
    job.iterators.clear()
    del batches
    second.remove()
    first.remove()


def test_all_together_leave_nothing_behind_in_whatever_order_they_are_put_in() -> None:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    train(model, optimizer, images(12))
    job = Job(models=[model], optimizers=[optimizer])
    every: list[Action] = [GcFreeze(), ChannelsLast(), FusedOptimizer()]
    for order in (every, every[::-1]):
        before = [action.state(job) for action in order]
        with ExitStack() as stack:
            for action in order:
                ready = stack.enter_context(action.prepare(job, None))
                stack.enter_context(action.apply(job, ready))
        for action, state in zip(order, before, strict=True):
            action.verify_undone(job, state)


@pytest.mark.parametrize("action", [FusedOptimizer(), ChannelsLast(), GcFreeze()])
def test_a_loop_of_accelerate_trains_as_it_does_alone(action: Action) -> None:
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for tried in (None, action):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = ConvNet()
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, images(96), scheduler)
        with tuned(tried, on=always):
            for image, label in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(image), label))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        ends.append(weights(accelerator.unwrap_model(model)))
    assert_close(ends[1], ends[0])


class OnCpu(AutocastFp16):
    """Does not insist on a GPU."""

    def check(self, job: Job) -> None:
        """See `Action.check`."""


@pytest.mark.parametrize("action", [OnCpu(), AutocastBf16(), RegionalCompile(), SetThreads()])
def test_the_numerics_check_passes_on_a_sound_model(
    action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scale's hooks on parameters, a block's slot and a route all have to be at work in it."""
    monkeypatch.setattr(_autocast, "MIN_RATE", 0.0)
    monkeypatch.setattr(_autocast, "PROBE_SIZES", (32,))
    monkeypatch.setattr(Compiler, "_backend", lambda self, graph, inputs: graph)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    inputs = ((torch.randn(16, 8),), {})
    job = Job(models=[model], inputs={id(model): inputs}, local_ranks=1)
    value = torch.get_num_threads() + 1 if isinstance(action, SetThreads) else None
    with action.prepare(job, value) as ready:
        before = action.state(job)
        verdict = compare_gradients(job, action.apply(job, ready), action.safety)
        action.verify_undone(job, before)
    assert verdict.ok, verdict.reason


def test_the_numerics_check_of_the_fused_optimizer_sees_fused_steps() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    job, action = Job(models=[model], optimizers=[optimizer]), FusedOptimizer()
    with torch.profiler.profile() as profile:
        verdict = compare_update(job, action.apply(job, []), action.safety)
    assert verdict.ok, verdict.reason
    assert any("_fused_adamw" in event.key for event in profile.key_averages())
