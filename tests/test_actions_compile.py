"""Compiled blocks: how they are put in and taken out, and what they compute."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._compiled import Compiler
from diagnose.actions.base import CannotApply
from diagnose.actions.regional_compile import RegionalCompile
from diagnose.core.job import Job
from tests.toggled import assert_close, assert_equal, tuned, weights

pytest_plugins = ("tests.compiled",)
pytestmark = pytest.mark.usefixtures("fresh_graphs")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + self.drop(nn.functional.gelu(self.up(self.norm(x_BD))))


class Deep(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


def loop(model: nn.Module, optimizer: Any, num_steps: int = 10, sizes: tuple[int, ...] = (4,)) -> None:
    for step in range(num_steps):
        model(torch.randn(sizes[step % len(sizes)], 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(action: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tuned(action):
        loop(model, optimizer, **options)
    return weights(model)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.extended
def test_compiled_for_real_it_trains_as_the_script_does_alone_dropout_included() -> None:
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tuned(RegionalCompile()) as live:
        loop(model, optimizer)
        assert live is not None
        compiler = live.prepared
    assert not compiler.failure.reason
    assert compiler.num_graphs in (1, 2), "three blocks share the graphs"
    assert compiler.seconds > 0
    assert_close(weights(model), run(None))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.extended
def test_compiled_for_real_a_script_may_go_back_through_a_graph_twice() -> None:
    model, action = Deep(depth=2), RegionalCompile()
    job = Job(models=[model], optimizers=[])
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert compiler.num_graphs > 0 and not compiler.failure.reason


def test_no_thread_may_donate_what_the_forward_pass_saved_while_it_is_prepared() -> None:
    from torch._functorch import config

    def seen() -> bool:
        with ThreadPoolExecutor(1) as other:
            return other.submit(lambda: config.donated_buffer).result()

    before = seen()
    with RegionalCompile().prepare(Job(models=[Deep()], optimizers=[]), None):
        assert (config.donated_buffer, seen()) == (False, False)
    assert (config.donated_buffer, seen()) == (before, before)


@pytest.mark.usefixtures("eager")
def test_toggling_compiles_nothing_again() -> None:
    model = Deep()
    job = Job(models=[model], optimizers=[])
    action, num_graphs = RegionalCompile(), []
    with action.prepare(job, None) as compiler:
        for _ in range(4):
            with action.apply(job, compiler):
                model(torch.randn(4, 8)).sum().backward()
            model(torch.randn(4, 8)).sum().backward()
            num_graphs.append(compiler.num_graphs)
    assert num_graphs[0] > 0 and len(set(num_graphs)) == 1


@pytest.mark.usefixtures("eager")
def test_with_the_hooks_in_place_nothing_of_ours_is_traced() -> None:
    """A hook of ours in the graph would change a guard in each step, and burn the limit of graphs."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tuned(RegionalCompile(), on=lambda step: True) as live:
        loop(model, optimizer, num_steps=20)
        assert live is not None
        assert not live.prepared.failure.reason
        assert live.prepared.num_graphs <= 2
    assert_close(weights(model), run(None, num_steps=20))


@pytest.mark.usefixtures("eager")
def test_evaluation_is_not_compiled() -> None:
    model = Deep()
    action, job = RegionalCompile(), Job(models=[model])
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        with torch.no_grad():
            model(torch.randn(4, 8))
        model.eval()(torch.randn(4, 8))
        assert compiler.num_graphs == 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("on", ["a part", "all modules"])
def test_hooks_that_the_script_registers_later_run_as_long_as_they_are_there(on: str) -> None:
    model, action = Deep(), RegionalCompile()
    job, seen = Job(models=[model], optimizers=[]), []
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        model(torch.randn(4, 8)).sum().backward()
        graphs = compiler.num_graphs

        def note(part: nn.Module, *_: Any) -> None:
            seen.append(part)

        register = (
            nn.modules.module.register_module_forward_hook
            if on == "all modules"
            else model.blocks[1].up.register_forward_hook
        )
        with register(note):
            model(torch.randn(4, 8)).sum().backward()
        num_seen = len(seen)
        assert seen.count(model.blocks[1].up) == 1
        model(torch.randn(4, 8)).sum().backward()
        assert (len(seen), compiler.num_graphs) == (num_seen, graphs)


@pytest.mark.usefixtures("eager")
def test_copies_and_pickles_are_not_compiled() -> None:
    model = Deep()
    action, job = RegionalCompile(), Job(models=[model])
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(block._compiled_call_impl is None for block in twin.blocks)
            with torch.no_grad():
                twin.blocks[0].up.weight.zero_()
        assert not torch.equal(model.blocks[0].up.weight, twin.blocks[0].up.weight)


def test_a_block_that_fails_to_compile_runs_as_written_in_the_same_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Compiler, graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Compiler, "_backend", broken)
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        action, job = RegionalCompile(), Job(models=[model])
        with action.prepare(job, None) as compiler:
            context = action.apply(job, compiler)
            if on:
                context.__enter__()
            loop(model, optimizer)
            if on:
                context.__exit__(None, None, None)
                assert "could not be compiled: BackendCompilerFailed" in compiler.failure.reason
                with pytest.raises(CannotApply, match="no such instruction"), action.apply(job, compiler):
                    pass
        ends.append(weights(model))
    assert_equal(ends[1], ends[0])


class Breaks(Block):
    """Decides by a tensor's value."""

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        if x_BD.sum().item() > 1e9:
            return x_BD
        return super().forward(x_BD)


@pytest.mark.usefixtures("eager")
def test_a_block_with_a_break_in_its_graph_runs_as_written() -> None:
    model = nn.Sequential(Breaks(8), Breaks(8))
    action, job = RegionalCompile(), Job(models=[model])
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        torch.manual_seed(0)
        ours = model(torch.ones(4, 8))
    torch.manual_seed(0)
    assert torch.equal(ours, model(torch.ones(4, 8)))
    assert "Breaks could not be compiled" in compiler.failure.reason


@pytest.mark.usefixtures("eager")
def test_an_exception_of_the_models_own_reaches_the_script_as_itself() -> None:
    class Picky(Block):
        def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
            if x_BD.shape[0] == 3:
                raise ValueError("not three")
            return super().forward(x_BD)

    model = nn.Sequential(Picky(8), Picky(8))
    action, job = RegionalCompile(), Job(models=[model])
    with (
        action.prepare(job, None) as compiler,
        action.apply(job, compiler),
        pytest.raises(ValueError, match="not three"),
    ):
        model(torch.ones(3, 8))


@pytest.mark.usefixtures("eager")
def test_too_many_shapes_end_in_the_blocks_as_written_and_not_in_an_error() -> None:
    torch._dynamo.config.recompile_limit, limit = 2, torch._dynamo.config.recompile_limit
    dynamic = torch._dynamo.config.automatic_dynamic_shapes
    torch._dynamo.config.automatic_dynamic_shapes = False
    try:
        model = Deep()
        action, job = RegionalCompile(), Job(models=[model])
        with action.prepare(job, None) as compiler, action.apply(job, compiler):
            for size in range(2, 8):
                model(torch.randn(size, 8)).sum().backward()
    finally:
        torch._dynamo.config.recompile_limit = limit
        torch._dynamo.config.automatic_dynamic_shapes = dynamic
    assert "could not be compiled" in compiler.failure.reason


class Preempted(RuntimeError):
    """What a script raises when it is told to make room."""


@pytest.mark.parametrize("when", ["it compiles", "it runs"])
def test_what_a_signal_handler_raises_in_a_compiled_block_reaches_the_script(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def rings(number: int, frame: object) -> None:
        raise Preempted("save now")

    def once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def backend(self: Compiler, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            if when == "it runs":
                once()
            return graph(*args)

        if when == "it compiles":
            once()
        self.num_graphs += 1
        return run

    monkeypatch.setattr(Compiler, "_backend", backend)
    model, action = Deep(depth=2), RegionalCompile()
    job = Job(models=[model], optimizers=[])
    before = signal.signal(signal.SIGUSR1, rings)
    try:
        with action.prepare(job, None) as compiler, action.apply(job, compiler):
            with pytest.raises(Preempted):
                model(torch.randn(4, 8))
            assert not compiler.failure.reason
            model(torch.randn(4, 8)).sum().backward()
            assert not compiler.failure.reason and compiler.num_graphs
    finally:
        signal.signal(signal.SIGUSR1, before)
