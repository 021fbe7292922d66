"""Which blocks are compiled, which scripts are left alone, and when compiled blocks must go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._blocks import blocks
from diagnose.actions.base import CannotApply
from diagnose.actions.regional_compile import RegionalCompile
from diagnose.core.job import Job
from tests.test_actions_compile import Block, Deep

pytest_plugins = ("tests.compiled",)
pytestmark = pytest.mark.usefixtures("fresh_graphs")


class Stage(nn.Sequential):
    """As a residual network has them."""


def test_the_blocks_are_the_outermost_that_repeat() -> None:
    model = Deep()
    (kind,) = blocks(Job(models=[model]))
    assert blocks(Job(models=[model]))[kind] == list(model.blocks)


def test_blocks_of_other_shapes_are_another_kind() -> None:
    stages = nn.Sequential(
        Stage(Block(4), Block(4)), nn.Linear(4, 8), Stage(Block(8), Block(8)), nn.Linear(8, 1)
    )
    model = nn.Module()
    model.one, model.other = stages[0], stages[2]
    found = blocks(Job(models=[model]))
    assert [len(same) for same in found.values()] == [2, 2]


def test_a_model_that_repeats_nothing_is_one_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    assert list(blocks(Job(models=[model])).values()) == [[model]]


def test_a_wrapped_model_is_looked_into() -> None:
    wrapped = nn.DataParallel(Deep())
    (same,) = blocks(Job(models=[wrapped])).values()
    assert same == list(wrapped.module.blocks)


@contextmanager
def hooked(model: Any) -> Iterator[None]:
    handle = model.blocks[0].up.register_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def compiled(model: Any) -> Iterator[None]:
    model.blocks[1].compile(backend="eager")
    yield


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    from torch._dynamo import config

    config.disable = True
    yield
    config.disable = False


@contextmanager
def without_compiler(model: Any) -> Iterator[None]:
    from torch._inductor import config

    before, config.cpp.cxx = config.cpp.cxx, ("no-such-compiler",)
    yield
    config.cpp.cxx = before


@pytest.mark.parametrize(
    "case, reason",
    [
        (hooked, "hooks"),
        (compiled, "compiles Block itself"),
        (switched_off, "switched off"),
        (without_compiler, "no C\\+\\+ compiler"),
    ],
)
def test_it_refuses(case: Any, reason: str) -> None:
    model = Deep()
    with case(model), pytest.raises(CannotApply, match=reason):
        RegionalCompile().check(Job(models=[model]))


def test_a_script_with_a_gradient_penalty_is_left_alone() -> None:
    job = Job(models=[Deep()], facts={"graph": {"second_order": True}})
    with pytest.raises(CannotApply, match="differentiates a gradient once more"):
        RegionalCompile().check(job)


@pytest.mark.extended
def test_blocks_that_compile_again_and_again_must_go(eager):
    """An attribute that changes from step to step is part of what a graph was made for."""
    torch.manual_seed(0)
    model, action = Deep(), RegionalCompile()
    for block in model.blocks:
        block.drop.p = 0.0
    job = Job(models=[model])
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        model(torch.randn(4, 8)).sum().backward()
        assert action.why_not_stay(compiler) == ""
        for step in range(3):
            model.blocks[0].drop.p = model.blocks[1].drop.p = model.blocks[2].drop.p = 0.1 * (step + 1)
            model(torch.randn(4, 8)).sum().backward()
        assert action.why_not_stay(compiler).startswith("it compiles again and again: ")
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_a_short_last_batch_is_no_reason_to_go(eager):
    torch.manual_seed(0)
    model, action = Deep(), RegionalCompile()
    job = Job(models=[model])
    with action.prepare(job, None) as compiler, action.apply(job, compiler):
        for size in (8, 8, 3, 8, 8, 3, 8):
            model(torch.randn(size, 8)).sum().backward()
        assert action.why_not_stay(compiler) == ""


def test_a_cold_cache_costs_twenty_seconds(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    action = RegionalCompile()
    assert action.start_up_s(Job()) == 20
    (tmp_path / "fxgraph" / "ab").mkdir(parents=True)
    assert action.start_up_s(Job()) == 1
