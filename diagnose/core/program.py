"""What the training program is made of, as its live objects told: loaders, optimizers, models, settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A `DataLoader` that fed the training loop.

    Attributes:
        num_workers: 0 when the training thread loads.
        batch_size: `None` for a loader that is given whole batches.
        file: Where the loader was made, absolute; empty when unknown.
        line: Its line.
    """

    num_workers: int
    batch_size: int | None = None
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer that stepped.

    Attributes:
        kind: Name of its class.
        num_tensors: Parameter tensors with a gradient.
        num_elements: Their elements.
        foreach: Whether it updates many tensors in one call, as it was set; `None` is torch's default.
        fused: Likewise for the fused implementation.
    """

    kind: str
    num_tensors: int
    num_elements: int
    foreach: bool | None = None
    fused: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is known of the program besides times. An empty tuple or `None` was not seen.

    Attributes:
        loaders: In order of first use.
        optimizers: In order of first step.
    """

    loaders: tuple[Loader, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
