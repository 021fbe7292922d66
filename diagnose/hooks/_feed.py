"""What feeds the loop: the iterators that it began for training, and totals of the input pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

COUNTERS = (
    "asked_aside",
    "collates",
    "collate_ns",
    "collate_cpu_ns",
    "collated_wait_ns",
    "collated_samples",
    "read_batches",
    "reads",
    "read_bytes",
    "made_batches",
    "made_bytes",
    "asked",
    "ready",
    "draws",
    "drawn_ns",
    "drawn_first_ns",
    "own_draws",
    "own_drawn_ns",
    "collected_ns",
    "collected_waiting_ns",
)
"""Training batches that another thread asks for ahead of the loop; batches whose collating was timed, the
time it took, what of it on a CPU, in threads of a pool too, the whole wait for them, and samples in them;
batches for which it was counted what the training thread reads, its system calls for that, and bytes; those
of them whose size is known, and their bytes; batches asked of workers, and finished ones that were waiting
then; batches drawn for workers by the sampler, the time that took, and that at the beginnings of epochs;
those drawn for the training thread itself, but for the first of each epoch, and the time that took; time in
the garbage collector, and what of it interrupted waits for batches."""


def _is_unknown(batches: Any) -> None:
    """Nobody has looked at the loader of an iterator."""


class Feed:
    """The loop's input, as the hooks of the loaders tell each other and the flusher.

    Attributes:
        iterators: Iterators that the loop began for training, each with the number of its loader among the
            facts.
        undrawn: Those of them that have still to draw the order of their samples, each with what
            `random_state` was when it had been begun.
        starting: Those for which workers were started to evaluate, until their first batch; each with what
            is told the time waited for that.
        freely: Numbers of the loaders whose training batches are asked for without gradients.
        begins_late: Takes an iterator that was begun without gradients for one that feeds training; returns
            the number of its loader, or `None` where that is gone.
        epochs_ended: How often the loop has asked for a batch beyond an epoch's last.
        counters: Running totals, see `COUNTERS`.
    """

    __slots__ = ("begins_late", "counters", "epochs_ended", "freely", "iterators", "starting", "undrawn")

    def __init__(self) -> None:
        self.iterators: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.undrawn: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.starting: weakref.WeakKeyDictionary[Any, Callable[[int], None]] = weakref.WeakKeyDictionary()
        self.freely: set[int] = set()
        self.begins_late: Callable[[Any], int | None] = _is_unknown
        self.epochs_ended = 0
        self.counters = dict.fromkeys(COUNTERS, 0)

    def clear(self) -> None:
        """Forgets everything, in place: the hooks hold the dictionaries."""
        self.iterators.clear()
        self.undrawn.clear()
        self.starting.clear()
        self.freely.clear()
        self.epochs_ended = 0
        self.counters.update(dict.fromkeys(COUNTERS, 0))
