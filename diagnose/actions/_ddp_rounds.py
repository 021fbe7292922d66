"""Communication hooks of several collectives, each made from what the one before has brought."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

Exchange = Callable[[Any, Any], Generator[list[Any], None, None]]
"""Gets the process group and a bucket. Yields collectives on their way, and goes on when they are done; in
the end the buffer of the bucket holds the average over the ranks. On every rank it yields equally often."""

_streams: dict[torch.device, Any] = {}
"""One for all hooks there ever are, by GPU: the allocator keeps memory for each stream there was."""


class InRounds:
    """A communication hook of one model.

    Collectives must be begun in the same order on every rank. So none is begun by a thread that learns that
    another is done, as torch's own hook for PowerSGD does, but in the thread of the backward pass: whenever
    a bucket is ready, all before it go on by one round, and with the last one all are brought to their end.

    On a GPU all of that is only queued, on a stream of its own: neither the host nor the backward pass
    waits.

    Args:
        name: What the reducer shall call the hook.
        exchange: Averages one bucket.
        at_the_end: Whether buckets wait for their second round until the last one is there: for an exchange
            that has to know what came, on the host.
    """

    def __init__(self, name: str, exchange: Exchange, *, at_the_end: bool = False) -> None:
        self.__name__ = name
        self._exchange = exchange
        self._at_the_end = at_the_end
        self._ahead: list[_UnderWay] = []

    def __call__(self, group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._ahead.clear()  # of a backward pass that an exception has cut short
        buffer_N = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer_N.device] if buffer_N.is_cuda else None
        )
        with self._beside(buffer_N.device):
            if not self._at_the_end:
                self._go_on()
            self._ahead.append(_UnderWay(self._exchange(group, bucket), future, buffer_N))
            self._ahead[-1].begin()
            while bucket.is_last() and self._ahead:
                self._go_on()
        return future

    def _go_on(self) -> None:
        self._ahead = [each for each in self._ahead if each.goes_on()]

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Lets a GPU do what is queued meanwhile after what the backward pass has queued, and beside what
        comes next."""
        if device.type != "cuda":
            yield
            return
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield


def gathering(into: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """Begins to gather every rank's part, one after the other along the first axis."""
    gather: Any = getattr(distributed, "all_gather_single", None)  # torch 2.13, where the older name warns
    return (gather or distributed.all_gather_into_tensor)(into, part, group=group, async_op=True)


class _UnderWay:
    """One bucket on its way."""

    def __init__(
        self,
        rounds: Generator[list[Any], None, None],
        future: torch.futures.Future[torch.Tensor],
        buffer_N: torch.Tensor,
    ) -> None:
        self._rounds = rounds
        self._future = future
        self._buffer_N = buffer_N
        self._works: list[Any] = []

    def begin(self) -> None:
        """Begins the first round."""
        with torch.no_grad():
            self._works = next(self._rounds)

    def goes_on(self) -> bool:
        """Ends one round and begins the next; `False` when that was the last one."""
        for work in self._works:
            work.wait()
        with torch.no_grad():
            works = next(self._rounds, None)
        if works is None:
            self._future.set_result(self._buffer_N)
            return False
        self._works = works
        return True
