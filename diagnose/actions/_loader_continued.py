"""One worker that goes on with the training process's random numbers, and hands them back with each batch.

Without workers, a dataset draws from the process's generators. A worker that has their states draws the
same numbers; and once the process has taken its batch together with the states that it left behind, all is
as if the batch had been made here. That holds as long as nobody else draws in between, which is looked at
before each batch is handed out: where somebody has, the batch is made here after all.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import _utils, get_worker_info

from diagnose.actions._loader_ahead import NOTHING
from diagnose.actions._loader_pool import Pool, View, Workers

DRAWS = 3
"""Surprises in a row that mean that the loop itself draws in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The process's random number generators on the CPU at one moment."""

    torch: bytes
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        """Returns those of this moment."""
        numpy_random, numpy = sys.modules.get("numpy.random"), None
        if numpy_random is not None:
            kind, keys, *rest = numpy_random.get_state()
            numpy = (kind, keys.tobytes(), *rest)
        return cls(torch=torch.get_rng_state().numpy().tobytes(), python=random.getstate(), numpy=numpy)

    def restore(self) -> None:
        """Sets the generators to that moment."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            kind, keys, *rest = self.numpy
            numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


class Begun:
    """The indices of a batch, which sets the generators of the worker that unpickles it."""

    def __init__(self, index: Any, states: States) -> None:
        self.index = index
        self.states = states

    def __reduce__(self) -> tuple[Callable[[Any, States], Any], tuple[Any, States]]:
        return _begin, (self.index, self.states)


_latest: States | None = None
"""In the worker: the generators as the next batch finds them."""


def _begin(index: Any, states: States) -> Any:
    global _latest
    if get_worker_info() is None:  # the training process looks through what no worker has begun
        return Begun(index, states)
    states.restore()
    _latest = states
    return index


class Made:
    """What a worker sends.

    Args:
        before: The generators when it was begun.
        after: As making it has left them.
    """

    def __init__(self, batch: Any, before: States | None, after: States) -> None:
        self.batch = batch
        self.before = before
        self.after = after

    def pin_memory(self) -> Made:
        """What torch's thread that pins batches calls."""
        return Made(_utils.pin_memory.pin_memory(self.batch), self.before, self.after)


class Carrying:
    """Stands for `collate_fn` in the worker."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Made:
        """Collates; the samples were fetched just before."""
        global _latest
        batch = self._collate_fn(samples)
        before, _latest = _latest, States.now()
        return Made(batch, before, _latest)


class ContinuingWorker(Workers):
    """A process whose batches are made with the numbers that the training process would have drawn.

    Attributes:
        void: Batches that were asked for and are begun with other numbers than the training process will
            have.
        surprises: How many batches in a row, not counting void ones, somebody had drawn before.
    """

    def __init__(self, view: View) -> None:
        self.void = self.surprises = 0
        self._outstanding = 0
        super().__init__(view)

    def ask(self, index: Any) -> int:
        """See `Workers.ask`. Where nothing else is asked for, this batch is the next one, and begins with
        what the generators are now; any other goes on from the one before."""
        if not self._outstanding:
            index = Begun(index, States.now())
        self._outstanding += 1
        return super().ask(index)

    def forget(self, numbers: Collection[int]) -> None:
        super().forget(numbers)
        self.begin_anew()

    def begin_anew(self) -> None:
        """What was asked for will not be handed out."""
        self._outstanding = self.void = 0

    def received(self, data: Any) -> Made | None:
        """The turn of a batch has come. Returns it, if the training process would make the same now."""
        self._outstanding = max(0, self._outstanding - 1)
        if isinstance(data, Made) and data.before == States.now():
            self.void = self.surprises = 0
            return data
        if not self.void:
            self.surprises += 1
        self.void = self._outstanding
        return None


class ContinuingPool(Pool):
    """A pool of one such worker."""

    workers: ContinuingWorker
    kind = ContinuingWorker

    @property
    def broken(self) -> str:
        """See `Pool.broken`. While void batches are ahead nothing more is asked for."""
        return super().broken or ("the training loop has drawn random numbers" if self.workers.void else "")

    def refresh(self, loader: Any, batches: Any) -> None:
        super().refresh(loader, batches)
        self.workers.begin_anew()

    def received(self, data: Any) -> Any:
        made = self.workers.received(data)
        if self.workers.surprises >= DRAWS and not self.refused:
            self.refused = "the training loop draws random numbers itself between two batches"
        if made is None:
            return NOTHING if isinstance(data, Made) else data
        if self.proven:  # else the batch is made here, too, and the generators move by that
            made.after.restore()
        return made.batch

    def _seen(
        self, collate_fn: Callable[[Any], Any], init: Callable[[int], None] | None
    ) -> tuple[Callable[[Any], Any], Callable[[int], None] | None]:
        return Carrying(collate_fn), init
