"""Times the nodes of an autograd graph while a backward pass goes through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any

MAX_NODES = 2000
"""A node's clock costs two microseconds of the pass; with more nodes there is none."""

END = -1


class NodeClock:
    """Notes when each node of a graph begins, in one backward pass after the other.

    On a CPU the engine runs one node after the other in the thread that asked for the pass, so a node takes
    the time until the next one begins. Leaves have no clock of their own: what a gradient takes to be put
    in its place belongs to the node that computed it.

    Args:
        clock: Tells nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._begun: list[tuple[int, int]] = []
        self._handles: list[Any] = []
        self._thread = 0

    def watch(self, grad_fns: Sequence[Any]) -> None:
        """Puts a clock on each of these, for the backward pass that is about to begin."""
        self.forget()
        if len(grad_fns) > MAX_NODES:
            return
        self._thread = get_ident()
        for index, grad_fn in enumerate(grad_fns):
            if not hasattr(grad_fn, "variable"):
                self._handles.append(grad_fn.register_prehook(partial(self._note, index)))

    def forget(self) -> None:
        """Takes the clocks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._begun = []

    @property
    def running(self) -> int | None:
        """The node that runs, by its place in the sequence; `None` where there is no clock on it."""
        if not self._begun or get_ident() != self._thread or self._begun[-1][0] == END:
            return None
        return self._begun[-1][0]

    def times_ns(self) -> dict[int, int]:
        """Returns what each node of the last pass took, by its place in the sequence; empty unless the pass
        came to its end, and went through no node twice."""
        indices = [index for index, _ in self._begun]
        if len(indices) < 2 or indices[-1] != END or len(set(indices)) < len(indices):
            return {}
        ends = [at_ns for _, at_ns in self._begun[1:]]
        return {
            index: end_ns - at_ns for (index, at_ns), end_ns in zip(self._begun[:-1], ends, strict=True)
        }

    def _note(self, index: int, _: Any) -> None:
        if get_ident() != self._thread:
            return  # a device's nodes run in a thread of its own, and only begin their work
        try:
            if not self._begun:
                from torch.autograd import Variable

                # Before the callbacks of others, such as DDP's, which waits there for the other ranks.
                Variable._execution_engine.queue_callback(partial(self._end, self._begun))
            self._begun.append((index, self._clock()))
        except Exception:  # noqa: BLE001 (a hook meets the script: without times, its pass goes on)
            self._thread = 0

    def _end(self, begun: list[tuple[int, int]]) -> None:
        if begun is self._begun:
            begun.append((END, self._clock()))
