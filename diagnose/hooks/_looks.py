"""The functions that hooks and the tuner leave with a recorder, to be called with what others see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Look = TypeVar("Look", bound=Callable[..., None])


@contextmanager
def added(looks: list[Look], look: Look) -> Iterator[None]:
    """Keeps a function in one of the lists; it may have taken itself out before."""
    try:
        looks.append(look)
        yield
    finally:
        if look in looks:
            looks.remove(look)


class Looks:
    """Lists of functions, which are called in the order in which they came, and guarded.

    The hooks hold these lists. Each function is called on the training thread if nothing else is said.

    Attributes:
        inspections: Called once each, after step `INSPECT_AFTER`: they look at live objects and add to
            the recorder's `facts`.
        cared: Called after each of the first `CURIOUS_UNTIL` steps, then now and then.
        flushed: Called in the flusher's thread with every flush; they add to `facts`, too.
        on_backward: Called with the arguments of some of the outermost backward passes, before them.
        on_inner_backward: Called with the arguments of each backward pass inside another one, before it, in
            whichever thread runs it; none but for a pass that is looked at.
        on_pass: Likewise with those of each outermost backward pass; they may take themselves out.
        on_forward: Called with the module, the arguments and the keyword arguments of some of the outermost
            model calls, before them, also of those without gradients; they may take themselves out.
        on_step: Called with each optimizer that is about to step, while the hooks look around.
        on_batch: Called with some of the batches that loaders gave the loop for training; none but for the
            steps that are looked at.
        on_iterator: Called with each loader and its iterator when the loop begins to iterate for training.
    """

    __slots__ = (
        "cared",
        "flushed",
        "inspections",
        "on_backward",
        "on_batch",
        "on_forward",
        "on_inner_backward",
        "on_iterator",
        "on_pass",
        "on_step",
    )

    def __init__(self) -> None:
        self.inspections: list[Callable[[], None]] = []
        self.cared: list[Callable[[], None]] = []
        self.flushed: list[Callable[[], None]] = []
        self.on_backward: list[Callable[[tuple[Any, ...]], None]] = []
        self.on_inner_backward: list[Callable[[tuple[Any, ...]], None]] = []
        self.on_pass: list[Callable[[tuple[Any, ...]], None]] = []
        self.on_forward: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], None]] = []
        self.on_step: list[Callable[[Any], None]] = []
        self.on_batch: list[Callable[[Any], None]] = []
        self.on_iterator: list[Callable[[Any, Any], None]] = []
