"""What was drawn from a sampler ahead of the loop, and is still to be handed out."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from queue import Empty
from typing import Any

import torch
from torch.utils.data import _utils

from diagnose.actions._loader_pool import Broken, Pool, Workers
from diagnose.actions._loader_probe import fetcher_of
from diagnose.actions._loader_sampler import own_index

NOTHING = object()


class Own:
    """A batch that the script's own workers were asked for."""


class Failed:
    """An exception of the script's sampler, to be raised when its turn has come."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Asked:
    """A batch that workers of ours were asked for.

    Attributes:
        index: What the sampler gave.
        both: Whether the script's own workers were asked for it, too: theirs is handed out, ours compared.
        data: The batch, if it was taken from the workers before its turn.
    """

    def __init__(self, pool: Pool, index: Any, *, both: bool = False) -> None:
        self.pool = pool
        self.index = index
        self.both = both
        self.workers: Workers | None = pool.workers
        self.number = -1
        self.data: Any = NOTHING
        try:
            self.index = own_index(index)
            self.number = pool.workers.ask(self.index)
        except Exception as error:  # noqa: BLE001 (ours: the index is drawn, and must not be lost)
            pool.refused = f"the workers cannot be asked: {error}"
            self.workers = None

    def take(self) -> Any:
        """Waits for the batch; `NOTHING` if it will not come."""
        if self.data is NOTHING and self.workers is not None:
            try:
                self.data = self.workers.get(self.number)
            except Broken:
                self.workers = None
        return self.data

    def if_there(self) -> Any:
        """Returns the batch if it has come; `NOTHING` if not."""
        if self.data is NOTHING and self.workers is not None and self.workers.has_come(self.number):
            return self.take()
        return self.data


class Early:
    """What a sampler did to generators of its own when it was asked ahead: put off until it is due.

    torch's samplers draw from a generator that they were given not only when an epoch begins, but also with
    its last batch. A loop that leaves the epoch before must not find it moved. No index beyond such a one
    is drawn before its time.

    Args:
        position: Which of the epoch's draws it was.
        moved: The generators that moved, and the states they had before. They are put back.
    """

    def __init__(self, position: int, moved: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        self.position = position
        self._after = [(stream, stream.get_state()) for stream, _ in moved]
        for stream, state in moved:
            stream.set_state(state)

    @classmethod
    def of(cls, position: int, streams: list[torch.Generator], before: list[torch.Tensor]) -> Early | None:
        """Returns what is to be put off, if any generator has moved since it had the state `before`; an
        empty list of states asks for nothing to be put off."""
        moved = [
            (stream, state)
            for stream, state in zip(streams, before, strict=False)
            if not torch.equal(stream.get_state(), state)
        ]
        return cls(position, moved) if moved else None

    def happens(self) -> None:
        """The loop has come to where the sampler would have done it."""
        for stream, state in self._after:
            stream.set_state(state)


class Depth:
    """More batches to be asked of each worker beforehand."""

    def __init__(self, factor: int) -> None:
        self.factor = factor


Ahead = Own | Failed | Asked
OWN = Own()


def own_if_there(batches: Any) -> Any:
    """Returns the next batch of the script's own workers if it has come; `NOTHING` if not.

    It is put where torch itself keeps a batch that came before its turn.
    """
    tasks, next_task = batches._task_info, batches._rcvd_idx
    with suppress(Empty):
        while len(tasks.get(next_task, (0, 0))) == 1:
            task, data = batches._data_queue.get_nowait()
            tasks[task] += (data,)
            batches._tasks_outstanding -= 1
    found = tasks.get(next_task, ())
    return found[1] if len(found) == 2 else NOTHING


def ask_own(batches: Any) -> Any:
    """Lets the script's own workers be asked for a batch; returns its index, `NOTHING` if there is none."""
    drawn = []

    def next_index() -> Any:
        drawn.append(type(batches)._next_index(batches))
        return drawn[-1]

    vars(batches)["_next_index"] = next_index
    try:
        type(batches)._try_put_index(batches)
    finally:
        del vars(batches)["_next_index"]
    return drawn[-1] if drawn else NOTHING


def forget(ahead: deque[Ahead]) -> None:
    """Nobody will ask for what is left of an epoch."""
    left: dict[Workers, list[int]] = {}
    for entry in ahead:
        if isinstance(entry, Asked) and entry.workers is not None:
            left.setdefault(entry.workers, []).append(entry.number)
    ahead.clear()
    for workers, numbers in left.items():
        workers.forget(numbers)


def made_here(batches: Any, index: Any) -> Any:
    """Makes a batch in the training process."""
    fetcher = getattr(batches, "_dataset_fetcher", None)
    data = (fetcher or fetcher_of(batches)).fetch(index)
    if batches._pin_memory:
        data = _utils.pin_memory.pin_memory(data, batches._pin_memory_device)
    return data
