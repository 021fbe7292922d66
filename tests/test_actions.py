"""What every action is held to, whichever file it is in: it says what it does, and it undoes itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diagnose import actions
from diagnose.actions._ddp import HOOKS, GradientHook
from diagnose.actions._shadow import compare_gradients
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.plugins import discover
from diagnose.core.trial import Safety
from tests.toggled import ConvNet, images, train, weights

ACTIONS = discover(actions, Action)
FOLDER = str(Path(actions.__file__).parent)
SECTIONS = ("What it does", "When it takes effect", "When it cannot help")
TOUCHES = ("nothing", "model", "optimizer", "ranks")
MAX_INTERRUPTIONS = 40
"""Places at which entering an action is interrupted: all, or so many of them, evenly."""

each_action = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.extended] * (name == "regional-compile")) for name in ACTIONS],
)
"""To compile takes its time."""


class Residual(nn.Module):
    """A block such as models repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return image_NCHW + self.inner(image_NCHW)


class Net(ConvNet):
    """A model that gives something to do to most actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Residual(), Residual(), nn.BatchNorm2d(4))
        self.head = nn.Linear(4 * 8 * 8, 2)


class Running:
    """A small job between two steps, as the controller hands it to actions."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader = images()
        train(self.model, self.optimizer, images(16))
        self.iterator = iter(self.loader)
        image, _ = next(self.iterator)
        self.job = Job(
            models=[self.model],
            optimizers=[self.optimizer],
            loaders=[self.loader],
            iterators=[self.iterator],
            inputs={id(self.model): ((image,), {})},
        )

    def step(self) -> None:
        """One more step of the loop, through the routes."""
        image, label = next(self.iterator)
        call: Callable[..., Any] = type(self.model).__call__
        for route in reversed(self.job.routes.get(id(self.model), [])):
            call = _through(route, call)
        nn.functional.cross_entropy(call(self.model, image), label).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for called in list(self.job.on_step):
            called()


def _through(route: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: route(call, args, kwargs)


@contextmanager
def prepared(action: Action, running: Running) -> Iterator[Any]:
    """Prepares an action, or skips the test where it refuses, which must leave the job alone."""
    before = action.state(running.job)
    with ExitStack() as stack:
        try:
            action.check(running.job)
            values = action.values(running.job)
            if not values:
                raise CannotApply("there is no other value")
            ready = stack.enter_context(action.prepare(running.job, values[0]))
        except CannotApply as refusal:
            action.verify_undone(running.job, before)
            assert str(refusal), "it must say why"
            pytest.skip(f"refused: {refusal}")
        yield ready
    action.verify_undone(running.job, before)


@each_action
def test_its_page_says_what_it_does_and_when(name: str) -> None:
    page = type(ACTIONS[name]).__doc__ or ""
    missing = [section for section in SECTIONS if f"## {section}\n" not in page]
    assert not missing


@each_action
def test_it_says_how_safe_it_is_and_what_is_checked(name: str) -> None:
    action = ACTIONS[name]
    assert isinstance(action.safety, Safety)
    assert action.touches in TOUCHES
    assert action.settle_steps >= 1
    assert action.safety in (Safety.EXACT, Safety.TRAINING) or action.touches != "nothing"


@each_action
def test_the_actions_that_it_excludes_exist(name: str) -> None:
    assert ACTIONS[name].excludes <= set(ACTIONS)


def test_actions_with_a_communication_hook_exclude_each_other() -> None:
    hooks = {name for name, action in ACTIONS.items() if isinstance(action, GradientHook)}
    assert hooks == HOOKS
    assert all(ACTIONS[name].excludes == hooks - {name} for name in hooks)


@each_action
def test_looking_changes_nothing(name: str) -> None:
    running, action = Running(), ACTIONS[name]
    before = action.state(running.job), weights(running.model), generators()
    try:
        action.check(running.job)
        action.values(running.job)
    except CannotApply:
        pass
    assert action.state(running.job) == before[0]
    assert all(map(torch.equal, weights(running.model), before[1]))
    assert generators() == before[2]


@each_action
def test_an_empty_job_is_refused_or_left_as_it_is(name: str) -> None:
    action, job = ACTIONS[name], Job()
    before = action.state(job)
    try:
        action.check(job)
    except CannotApply as refusal:
        assert str(refusal)
    action.verify_undone(job, before)


@each_action
def test_it_can_be_applied_and_undone_again_and_again(name: str) -> None:
    running, action = Running(), ACTIONS[name]
    with prepared(action, running) as ready:
        for _ in range(2):
            before = action.state(running.job)
            with action.apply(running.job, ready):
                running.step()
            action.verify_undone(running.job, before)
            running.step()


@each_action
def test_its_state_tells_applied_from_undone(name: str) -> None:
    running, action = Running(), ACTIONS[name]
    with prepared(action, running) as ready:
        before = action.state(running.job)
        with action.apply(running.job, ready), pytest.raises(RuntimeError, match="was not undone"):
            running.step()
            action.verify_undone(running.job, before)
        action.verify_undone(running.job, before)


@each_action
def test_an_exception_of_the_script_undoes_it(name: str) -> None:
    running, action = Running(), ACTIONS[name]
    with prepared(action, running) as ready:
        before = action.state(running.job)
        with pytest.raises(KeyError), action.apply(running.job, ready):
            running.step()
            raise KeyError("the script's")
        action.verify_undone(running.job, before)
        running.step()


@each_action
def test_applying_moves_no_random_generator(name: str) -> None:
    running, action = Running(), ACTIONS[name]
    with prepared(action, running) as ready:
        before = generators()
        with action.apply(running.job, ready):
            pass
        assert generators() == before


@each_action
def test_interrupted_while_it_is_applied_it_is_undone(name: str) -> None:
    """Ctrl-C may come at any line."""
    running, action = Running(), ACTIONS[name]
    with prepared(action, running) as ready:
        before = action.state(running.job)
        num_lines = entered(action, running.job, ready, interrupt_at=0)
        for line in range(1, num_lines + 1, 1 + num_lines // MAX_INTERRUPTIONS):
            with pytest.raises(KeyboardInterrupt):
                entered(action, running.job, ready, interrupt_at=line)
            action.verify_undone(running.job, before)
        running.step()


def entered(action: Action, job: Job, ready: Any, interrupt_at: int) -> int:
    """Applies an action and undoes it; raises at one of the lines of ours that entering it runs.

    Returns:
        How many lines that were.
    """
    lines, entering = 0, True

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not entering or not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == interrupt_at:
                raise KeyboardInterrupt
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        with action.apply(job, ready):
            entering = False
    finally:
        sys.settrace(tracer)
    return lines


def replaying() -> Running:
    """A job of whose model `torch.cuda.make_graphed_callables` has captured a part."""
    running = Running()
    part: Any = running.model.body[1]
    part.forward = lambda image: image
    part.forward.__module__ = "torch.cuda.graphs"
    return running


@pytest.mark.parametrize("name", ["autocast-bf16", "channels-last", "micro-batching", "regional-compile"])
def test_a_model_that_replays_a_cuda_graph_is_called_in_no_other_way(name: str) -> None:
    with pytest.raises(CannotApply, match="Residual is a CUDA graph"):
        ACTIONS[name].check(replaying().job)


def test_a_model_that_replays_a_cuda_graph_is_not_called_beside_the_training() -> None:
    """Each call would write its results over those that the script may hold."""
    verdict = compare_gradients(replaying().job, nullcontext(), Safety.EXACT)
    assert not verdict.ok
    assert "Residual is a CUDA graph" in verdict.reason


def generators() -> tuple[object, ...]:
    """The state of the random generators of the main process."""
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest
