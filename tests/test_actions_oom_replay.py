"""A step that ran out of memory is replayed: exactly, or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions.base import CannotApply
from diagnose.actions.oom_replay import OomReplay
from diagnose.core.job import Job
from tests.changed_training import Applied, Net, difference, job_of, same, train
from tests.mixing import mixed, mostly_extended
from tests.running import run_ranks

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Starved:
    """Raises as CUDA does, at some calls of a layer in the forward or the backward pass."""

    def __init__(
        self,
        forward: Collection[int] = (),
        backward: Collection[int] = (),
        error: type[RuntimeError] = torch.OutOfMemoryError,
        words: str = OUT_OF_MEMORY,
    ) -> None:
        self.error, self.words = error, words
        self.forward, self.backward = set(forward), set(backward)
        self.calls = self.passes = 0
        self.armed = False

    def layer(self) -> nn.Module:
        starved = self

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
                starved.calls += 1
                if starved.armed and starved.calls in starved.forward:
                    raise starved.error(starved.words)
                return rows.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                starved.passes += 1
                if starved.armed and starved.passes in starved.backward:
                    raise starved.error(starved.words)
                return gradient

        class Module(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return Layer.apply(rows)

        return Module()


def starving(starved: Starved | None = None, **options: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        net = Net(**options)
        net.blocks.append((starved or Starved()).layer())
        return net

    return model


FAILURES = {
    "none": Starved,
    "forward": lambda: Starved(forward={2}),
    "forward twice": lambda: Starved(forward={2, 3}),
    "backward": lambda: Starved(backward={2}),
    "backward twice": lambda: Starved(backward={2, 3}),
    "both": lambda: Starved(forward={2}, backward={2}),
}


@pytest.mark.parametrize("failure, accumulate", mixed(FAILURES, {"each batch": 1, "two batches": 2}))
def test_a_replayed_step_is_exact_with_batch_norm_and_dropout(
    failure: Callable[[], Starved], accumulate: int
) -> None:
    starved = failure()
    options = {"norm": True, "dropout": 0.3}
    changed = train(starving(starved, **options), failing(starved), accumulate=accumulate)
    left_alone = train(starving(**options), accumulate=accumulate)
    assert same(changed, left_alone)


def failing(starved: Starved) -> Applied:
    """Lets it fail while the action is in force; calls are counted from there."""

    @contextmanager
    def applied(job: Job) -> Iterator[None]:
        action = OomReplay()
        before = action.state(job)
        with action.prepare(job, None) as prepared, action.apply(job, prepared):
            starved.calls, starved.passes, starved.armed = 0, 0, True
            yield
            starved.armed = False
            assert starved.forward <= set(range(1, starved.calls + 1)), "every failure has happened"
            assert starved.backward <= set(range(1, starved.passes + 1)), "every failure has happened"
        action.verify_undone(job, before)

    return applied


IN_PIECES = {
    "forward": Starved(forward={1, 2, 3}),
    "forward and the first piece": Starved(forward={1, 2, 3, 4}),
    "backward": Starved(backward={1, 2, 3}),
    "backward and the first piece": Starved(backward={1, 2, 3, 4}),
    "both": Starved(forward={1, 2, 3}, backward={1, 2}),
}


@pytest.mark.parametrize("starved", mostly_extended(IN_PIECES, "forward and the first piece"))
def test_a_step_replayed_in_pieces_only_rounds_differently(starved: Starved) -> None:
    changed = train(starving(starved), failing(starved))
    left_alone = train(starving())
    assert 0 < difference(changed, left_alone) < 1e-12
    assert changed[2:] == left_alone[2:]


WORDS = {
    "cuDNN finds none": "FIND was unable to find an engine to execute this computation",
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA": "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`",
}


@pytest.mark.parametrize("words", mostly_extended(WORDS, "cuDNN finds none", "cuBLAS"))
@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.extended), "backward"])
def test_what_cudnn_and_cublas_say_of_memory_is_replayed_too(where: str, words: str) -> None:
    failures: Any = {where: {1, 2, 3}}
    starved = Starved(**failures, error=RuntimeError, words=words)
    assert 0 < difference(train(starving(starved), failing(starved)), train(starving())) < 1e-12


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_error_is_not_replayed(where: str) -> None:
    failures: Any = {where: {2}}
    starved = Starved(**failures, error=RuntimeError, words="mat1 and mat2 shapes differ")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(starving(starved), failing(starved))
    assert (starved.calls if where == "forward" else starved.passes) == 2


@pytest.mark.extended
def test_what_never_fits_fails_as_it_would_have() -> None:
    starved = Starved(forward=set(range(1, 100)))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        train(starving(starved), failing(starved))


def test_replay_is_refused_on_a_cpu() -> None:
    with pytest.raises(CannotApply, match="the operating system ends the process"):
        OomReplay().check(job_of(Net()))


@pytest.mark.extended
def test_one_rank_replays_and_the_others_do_not_notice() -> None:
    first, _ = run_ranks("-m", "tests.scripts.replay_on_one_rank")
    results = [line.split() for line in first.stdout.splitlines()]
    assert [(name, number) for name, number, *_ in results] == [
        (name, number) for number in ("1", "2") for name in ("segment", "pieces", "replay")
    ]
    for name, _, from_plain, between_ranks in results:
        assert float(between_ranks) == 0, name
        assert float(from_plain) == 0 if name == "segment" else 0 < float(from_plain) < 1e-14, name
