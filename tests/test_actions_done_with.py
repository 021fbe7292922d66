"""What the script is done with is freed at once, whatever is in force on it, and that comes out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions import autocast_bf16, autocast_fp16, gc_freeze
from diagnose.actions.base import Action
from diagnose.core.job import Job
from diagnose.tuner.installed import Installed
from tests.kernels_on_cpu import kernels_on_cpu
from tests.test_actions import ACTIONS, Residual, Running

pytest_plugins = ("tests.group_of_one",)

HUNG = [
    "activation-checkpointing",
    "autocast-bf16",
    pytest.param("autocast-fp16", marks=pytest.mark.extended),
    pytest.param("batch-growth", marks=pytest.mark.extended),
    "channels-last",
    "fused-optimizer",
    "gradient-accumulation",
    pytest.param("micro-batching", marks=pytest.mark.extended),
    "oom-replay",
    "optimizer-in-backward",
    pytest.param("regional-compile", marks=pytest.mark.extended),
    pytest.param("save-on-cpu", marks=pytest.mark.extended),
]
BY_KERNELS = ["fused-optimizer", "eight-bit-states"]
OF_RANKS = [
    "ddp-bf16-hook",
    "ddp-bucket-size",
    "ddp-power-sgd-hook",
    "ddp-top-k-hook",
    "find-unused-off",
    "no-sync",
    "static-graph",
]


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Plain(nn.Module):
    """Parts that can be cut in pieces, checkpointed and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Residual(), Residual())
        self.head = nn.Linear(4 * 8 * 8, 2)

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image_NCHW).flatten(1))


def running() -> Running:
    """A loop that only its own variables hold."""
    loop = Running()
    loop.model = Plain()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.job.models, loop.job.optimizers = [loop.model], [loop.optimizer]
    image, _ = next(loop.iterator)
    loop.job.inputs = {id(loop.model): ((image,), {})}
    loop.step()
    return loop


def done_with(loop: Any) -> tuple[weakref.ref[Any], weakref.ref[Any]]:
    """The script leaves the function that trained, and the tuner the step."""
    job = loop.job
    job.models, job.optimizers, job.inputs = [], [], {}
    alive = weakref.ref(loop.model), weakref.ref(loop.optimizer)
    loop.model = loop.optimizer = None
    return alive


def put_on(name: str, job: Job) -> Installed:
    action: Action = ACTIONS[name]
    value = 1 if name == "ddp-bucket-size" else next(iter(action.values(job)), None)
    return Installed(name, action, job, value)


def test_nothing_else_keeps_them_alive():
    model, optimizer = done_with(running())
    assert (model(), optimizer()) == (None, None)


def test_every_action_that_is_hung_on_them_is_looked_at_here():
    looked_at = {getattr(each, "values", [each])[0] for each in (*HUNG, *BY_KERNELS, *OF_RANKS)}
    hooks = {name for name in ACTIONS if name.startswith("ddp-")}  # which share their code
    assert {name for name, action in ACTIONS.items() if action.hangs_on} == looked_at | hooks


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.extended), True])
@pytest.mark.parametrize("name", HUNG)
def test_a_change_in_force_keeps_neither_model_nor_optimizer_alive(name, again, monkeypatch):
    for module in (autocast_bf16, autocast_fp16):
        monkeypatch.setattr(module, "refuse_slower", lambda *args: None)
    loop = running()
    loop.job.epochs_ended = 1
    installed = put_on(name, loop.job)
    for _ in range(2 if again else 1):
        installed.switch(False)
        installed.switch(True)
        loop.step()
        loop.step()
    if again:
        installed.switch(False)  # a trial or a measurement has taken it out meanwhile
    model, optimizer = done_with(loop)
    assert (model(), optimizer()) == (None, None)
    assert not loop.job.routes, "another model may get its number"
    assert installed.is_over()
    installed.remove()
    assert not loop.job.routes and not loop.job.on_step


@pytest.mark.parametrize("name", BY_KERNELS)
def test_nor_do_kernels_under_an_optimizer(name):
    with kernels_on_cpu() as device:
        loop = running()
        installed = put_on(name, loop.job)
        installed.switch(True)
        loop.step()
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.step()
        assert device.launched
        model, optimizer = done_with(loop)
        assert (model(), optimizer()) == (None, None)
        assert installed.is_over() and not installed.why_not_stay()
        installed.remove()


class Wrapper(nn.Module):
    """What a script makes anew around the same model, as DDP where other weights are to be trained."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.criterion = net, nn.MSELoss()

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return self.net(image_NCHW)


@pytest.mark.parametrize("name", ["activation-checkpointing", "regional-compile"])
def test_what_is_hung_on_blocks_stays_where_the_same_ones_are_wrapped_anew(name):
    loop = running()
    net, loop.model = loop.model, Wrapper(loop.model)
    loop.job.models, loop.job.inputs = [loop.model], {id(loop.model): next(iter(loop.job.inputs.values()))}
    installed = put_on(name, loop.job)
    installed.switch(True)
    wrapper, _ = done_with(loop)
    assert wrapper() is None and not installed.is_over()
    assert any(vars(module).get("_compiled_call_impl") for module in net.modules())
    installed.switch(False)
    installed.switch(True)
    assert any(vars(module).get("_compiled_call_impl") for module in net.modules())
    del net
    assert installed.is_over()
    installed.remove()


class Wrapped:
    """A loop of two passes a step on a model that is wrapped in DDP."""

    def __init__(self, **settings: bool) -> None:
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2)), **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.job = Job(models=[self.model], optimizers=[self.optimizer])
        self.step()

    def step(self) -> None:
        call = lambda model, rows: model(rows)  # noqa: E731
        for _ in range(2):
            for route in self.job.routes.get(id(self.model), [lambda call, args, kwargs: call(*args)]):
                route(call, (self.model, torch.ones(3, 4)), {}).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for ends in self.job.on_step:
            ends()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", [None, *OF_RANKS])
def test_nor_does_what_changes_how_ranks_talk(name):
    loop = Wrapped(find_unused_parameters=name in ("find-unused-off", "static-graph"))
    installed = put_on(name, loop.job) if name is not None else None
    if installed is not None:
        for _ in range(5):
            loop.step()
        installed.switch(True)
        for _ in range(3):
            loop.step()
    model, optimizer = done_with(loop)
    assert (model(), optimizer()) == (None, None)
    if installed is not None:
        assert installed.is_over()
        installed.remove()
    assert not loop.job.routes and not loop.job.on_step


def test_a_new_optimizer_of_the_same_model_is_not_stepped_for_by_the_one_that_is_gone():
    loop = running()
    installed = put_on("optimizer-in-backward", loop.job)
    installed.switch(True)
    for _ in range(3):
        loop.step()
    loop.job.optimizers = []
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), 0.1)
    before = [p.detach().clone() for p in loop.model.parameters()]
    seen = []
    handle = loop.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad is not None for p in loop.model.parameters())
    )
    loop.step()
    handle.remove()
    assert all(seen)
    assert not any(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    installed.remove()


def test_a_model_in_a_cycle_that_was_frozen_is_freed_where_memory_grows(monkeypatch):
    held = [0, 0]
    monkeypatch.setattr(gc_freeze, "held_bytes", lambda: tuple(held))
    model = Plain()
    model.itself = [model]
    alive, loop = weakref.ref(model), Job()
    gc.enable()
    with ACTIONS["gc-freeze"].apply(loop, None):
        del model
        for _ in range(2 * gc_freeze.LOOK_EVERY):
            loop.on_step[0]()
        assert alive() is not None
        held[1] += gc_freeze.GROWTH_BYTES
        for _ in range(gc_freeze.LOOK_EVERY):
            loop.on_step[0]()
        assert alive() is None
        assert gc.get_freeze_count()
