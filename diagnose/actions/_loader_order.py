"""In which order batches come, whoever makes them: the order in which the script's sampler names them."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import finalize

from diagnose.actions._loader_ahead import OWN, Ahead, Asked, Early, Failed, forget
from diagnose.actions._loader_pool import Pool
from diagnose.actions._loader_probe import length
from diagnose.actions._loader_purity import generators


class Order:
    """What was drawn from the sampler of one iterator and is still to be handed out.

    Args:
        batches: The iterator. It is not kept alive.

    Attributes:
        ahead: The batches, the next one first.
        ended: Whether the sampler has nothing left.
        early: What it did before its time, if anything is put off.
        num_workers: The script's own workers.
        own_factor: Batches that each of them is asked for beforehand, without us.
        handed: Batches of this epoch that were handed out, or raised an exception.
    """

    def __init__(self, batches: Any) -> None:
        self.ahead: deque[Ahead] = deque()
        self.ended = False
        self.early: Early | None = None
        self.handed = 0
        self.num_workers: int = batches._num_workers
        self.own_factor: int = batches._prefetch_factor if self.num_workers else 0
        self._sampling: Any = None
        self._streams: list[Any] = []
        self._length: int | None = None
        finalize(batches, forget, self.ahead).atexit = False
        self.begin_if_new(batches)

    def begin_if_new(self, batches: Any) -> None:
        """Where an epoch has begun: what was left of another one is forgotten."""
        if batches._sampler_iter is self._sampling:
            return
        forget(self.ahead)
        self._sampling = batches._sampler_iter
        self._streams, self._length = [], None
        self.early = None
        self.ended = False
        self.handed = batches._num_yielded
        if self.num_workers:
            self.ahead.extend([OWN] * (batches._send_idx - batches._rcvd_idx))
        # Last, because they look into objects of the script's.
        self._streams = generators(batches._index_sampler)
        self._length = length(batches)

    def pop(self) -> None:
        """The next batch is handed out."""
        self.ahead.popleft()
        self.handed += 1

    def due(self, asked: int) -> int:
        """Returns how many indices would have been drawn by now without us."""
        return asked + self.own_factor * self.num_workers

    def fill(self, batches: Any, pool: Pool | None, factor: int, asked: int) -> None:
        """Asks for batches ahead, as many as whoever makes them now is to be asked for.

        Args:
            batches: The iterator.
            pool: Who makes them; `None` is the script itself.
            factor: How many each worker is to be asked for beforehand.
            asked: How many batches the loop has asked for in this epoch.
        """
        due = self.due(asked)
        if self.early is not None and self.early.position <= due:
            self.early.happens()
            self.early = None
        if pool is None and not self.num_workers:
            return
        if pool is not None:
            mine = sum(isinstance(entry, Asked) and entry.pool is pool for entry in self.ahead)
            room = factor * pool.num_workers - mine
        else:
            # As torch counts: a batch that came before its turn is still ahead.
            room = factor * self.num_workers - sum(entry is OWN for entry in self.ahead)
        # No fewer than without us: a sampler that moves a generator at its end does so when it would have.
        room = max(room, due - self.handed - len(self.ahead))
        while room > 0 and self.draw(batches, pool, factor, due):
            room -= 1

    def draw(self, batches: Any, pool: Pool | None, factor: int, due: int) -> bool:
        """Draws an index and asks for its batch: a pool, or the script's own workers.

        Returns:
            Whether that may be done once more. What a sampler does when it ends, such as drawing a random
            number of the process's, must not happen before it would have without us.
        """
        if self.ended or self.early is not None or (self.ahead and isinstance(self.ahead[-1], Failed)):
            return False
        drawn = self.handed + len(self.ahead)
        if self._length is not None and drawn >= max(self._length, due):
            return False
        if pool is None and batches._send_idx - batches._rcvd_idx >= factor * self.num_workers:
            return False  # the queue was deeper before
        before = [stream.get_state() for stream in self._streams] if drawn >= due else []
        try:
            if pool is not None:
                index = batches._next_index()
                self.ahead.append(Asked(pool, index))
            elif _is_asked(batches):
                self.ahead.append(OWN)
            else:
                self.ended = True
        except StopIteration:
            self.ended = True
        except Exception as error:
            if pool is None:
                raise  # where torch raises it
            self.ahead.append(Failed(error))
        self.early = Early.of(drawn + 1, self._streams, before)
        return True


def _is_asked(batches: Any) -> bool:
    """Lets the script's own workers be asked for a batch; returns whether there was one."""
    sent = batches._send_idx
    type(batches)._try_put_index(batches)
    return bool(batches._send_idx != sent)
