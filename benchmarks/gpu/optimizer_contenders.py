"""Who takes part in `optimizers.py`: torch's optimizers, those of other libraries, and the kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from optimizer_clock import Pipeline
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
MOMENTUM = 0.9
ADAM = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}

LOSS_SCALE = 1024.0
"""A power of two: dividing by it changes no digit."""

LAMB_MAX_NORM = 1.0
"""The gradient's norm above which LAMB clips, by default in apex and timm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is stepped.

    Attributes:
        params: The parameters; `.grad` of each is one of `grads`.
        grads: Their gradients.
        kept: The gradients as they were before any step; empty if no contender changes them.
        max_norm: To which the gradients are clipped.
        dry_run: Whether this is a rehearsal on a CPU.
    """

    params: list[Tensor]
    grads: list[Tensor]
    kept: list[Tensor]
    max_norm: float
    dry_run: bool

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.params[0].device

    def refresh(self) -> None:
        """Makes the gradients those before clipping again."""
        if self.kept:
            torch._foreach_copy_(self.grads, self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do a row's work.

    Attributes:
        name: What the table calls it.
        bytes_per_element: What its reads and writes of one step come to; `None` if nobody has counted.
        build: Prepares it. Raises `ImportError` where it is not installed.
        ours: Whether it is this project's.
        note: What a reader must know to compare it with the others.
        compiled: Whether it compiles at its first step, for a minute or so.
        builds: Whether making it compiles an extension, for a minute or so, unless that was done before.
    """

    name: str
    bytes_per_element: float | None
    build: Callable[[Work], Pipeline]
    ours: bool = False
    note: str = ""
    compiled: bool = False
    builds: bool = False

    def known_as(self, letter: str) -> str:
        """What it is called where one that broke a process is to be left out: with its row, unless what
        broke is likely to break in every row."""
        return self.name if self.compiled or self.builds else f"{letter}: {self.name}"


def stepping(make: Callable[[list[Tensor]], Optimizer], *, clips: bool) -> Callable[[Work], Pipeline]:
    """An optimizer as a script uses it."""

    def build(work: Work) -> Pipeline:
        return Pipeline(
            step=script_step(make(work.params), work, clips=clips), weights=work.params, after=work.refresh
        )

    return build


def script_step(optimizer: Optimizer, work: Work, *, clips: bool) -> Callable[[], object]:
    """The lines of a script between `backward` and `zero_grad`."""

    def step() -> None:
        if clips:
            clip_grad_norm_(work.params, work.max_norm)
        optimizer.step()

    return step


def compiled(*, clips: bool) -> Callable[[Work], Pipeline]:
    """torch's AdamW and the clipping before it in one compiled graph. The learning rate is a tensor: with a
    number each new one would be compiled for."""

    def build(work: Work) -> Pipeline:
        rate = torch.tensor(LR, device=work.device)
        optimizer = AdamW(work.params, **{**ADAM, "lr": rate}, capturable=not work.dry_run)
        step = script_step(optimizer, work, clips=clips)
        # All that were built before share this code, and behind the eighth graph torch goes on uncompiled.
        torch.compiler.reset()
        backend = "eager" if work.dry_run else "inductor"
        return Pipeline(step=torch.compile(step, backend=backend), weights=work.params, after=work.refresh)

    return build


def scaled(
    make: Callable[[list[Tensor]], Optimizer], *, clips: bool = True, **swapped: Any
) -> Callable[[Work], Pipeline]:
    """Unscaling, clipping and the step, as a `GradScaler` does them. With `swapped`, by kernels."""

    def build(work: Work) -> Pipeline:
        optimizer = make(work.params)
        scaler = torch.amp.GradScaler(work.device.type, init_scale=LOSS_SCALE, growth_interval=1 << 30)
        scaler.scale(torch.ones((), device=work.device))  # which makes the scale's tensor

        def step() -> None:
            if clips:
                scaler.unscale_(optimizer)
                clip_grad_norm_(work.params, work.max_norm)
            scaler.step(optimizer)

        def after() -> None:
            scaler.update()
            work.refresh()

        pipeline = Pipeline(step=step, weights=work.params, after=after)
        if swapped:
            pipeline.turn = lambda: kernels_under(optimizer, **swapped)
        return pipeline

    return build


def ours(
    make: Callable[[list[Tensor]], Optimizer], *, clips: bool, moving: bool = False, **swapped: Any
) -> Callable[[Work], Pipeline]:
    """An optimizer of torch's with kernels swapped in, as a script uses it.

    Args:
        make: Makes the optimizer.
        clips: Whether the script clips.
        moving: Whether the gradients are elsewhere at each step, which the kernels have to be told.
        swapped: Of `swap`.
    """

    def build(work: Work) -> Pipeline:
        optimizer = make(work.params)
        pipeline = Pipeline(
            step=script_step(optimizer, work, clips=clips),
            weights=work.params,
            after=work.refresh,
            turn=lambda: kernels_under(optimizer, **swapped),
        )
        return moved(pipeline, work) if moving else pipeline

    return build


def moved(pipeline: Pipeline, work: Work) -> Pipeline:
    """Has each gradient at one of two addresses in turn. The second is there for as long as it is the
    pipeline's turn: the largest parameters leave no room for it beside what others take in theirs."""
    swapped_in = pipeline.turn
    places: list[list[Tensor]] = []

    @contextmanager
    def turn() -> Iterator[None]:
        places[:] = [work.grads, [grad.clone() for grad in work.grads]]
        try:
            with swapped_in():
                yield
        finally:
            places.clear()

    def after() -> None:
        places.reverse()
        for param, grad in zip(work.params, places[0], strict=True):
            param.grad = grad

    pipeline.turn, pipeline.after = turn, after
    return pipeline


@contextmanager
def kernels_under(optimizer: Optimizer, **swapped: Any) -> Iterator[None]:
    """Swaps kernels in while open. What they leave to torch is an error: it would be timed as theirs."""
    from diagnose.kernels._swap import swap, unswap

    taken = swap(optimizer, **swapped)
    try:
        yield
        if taken.stepper.left:
            raise RuntimeError(f"left to torch: {'; '.join(taken.stepper.left)}")
    finally:
        unswap(optimizer)


def adamw(**options: Any) -> Callable[[list[Tensor]], Optimizer]:
    """torch's AdamW."""
    return lambda params: AdamW(params, **{**ADAM, **options})


def sgd(**options: Any) -> Callable[[list[Tensor]], Optimizer]:
    """torch's SGD with nesterov's momentum."""
    settings = {"lr": LR, "momentum": MOMENTUM, "nesterov": True, "weight_decay": DECAY}
    return lambda params: SGD(params, **{**settings, **options})


def of_library(module: str, name: str, **options: Any) -> Callable[[list[Tensor]], Optimizer]:
    """An optimizer of a library that may not be installed."""

    def make(params: list[Tensor]) -> Optimizer:
        found: Optimizer = getattr(importlib.import_module(module), name)(params, **options)
        return found

    return make


def masters(work: Work) -> Pipeline:
    """fp32 masters of bf16 parameters, with torch's own functions: what scripts write by hand."""
    weights = [param.detach().float() for param in work.params]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    wide = [weight.grad for weight in weights]
    optimizer = AdamW(weights, **ADAM, fused=True)

    def step() -> None:
        torch._foreach_copy_(wide, work.grads)
        clip_grad_norm_(weights, work.max_norm)
        optimizer.step()
        torch._foreach_copy_(work.params, weights)

    return Pipeline(step=no_grad(step), weights=weights)


def no_grad(step: Callable[[], object]) -> Callable[[], object]:
    """Of a function that writes into parameters."""

    def inner() -> None:
        with torch.no_grad():
            step()

    return inner
