"""Where the batches of one of the script's iterators come from, switched between two batches.

torch's `__next__` calls `self._next_data()`. An attribute of that name on the iterator itself takes its
place; everything else about the iterator stays the script's: its type, length, warnings, sampler. Indices
are drawn from the sampler in one order whoever makes the batches, and batches are handed out in that order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

from torch._utils import ExceptionWrapper

from diagnose.actions._loader_ahead import (
    NOTHING,
    OWN,
    Ahead,
    Asked,
    Depth,
    Early,
    Failed,
    Own,
    forget,
    made_here,
)
from diagnose.actions._loader_pool import Impure, Pool
from diagnose.actions._loader_probe import length
from diagnose.actions._loader_purity import generators, same


class Feed:
    """Hands out the batches of one iterator of the script's.

    Args:
        batches: The iterator. It is not kept alive.
    """

    def __init__(self, batches: Any) -> None:
        self._batches: Callable[[], Any] = ref(batches)
        self._num_workers: int = batches._num_workers
        self._own_factor: int = batches._prefetch_factor if self._num_workers else 0
        self._pools: list[Pool] = []
        self._depths: list[Depth] = []
        self._ahead: deque[Ahead] = deque()
        self._sampling: Any = None
        self._streams: list[Any] = []
        self._early: Early | None = None
        self._length: int | None = None
        self._ended = False
        self._lock = threading.RLock()  # some scripts fetch in a thread of their own
        finalize(batches, forget, self._ahead).atexit = False
        self._begin(batches)

    # -- what actions call, between two batches

    def use(self, pool: Pool) -> None:
        """The next index that is drawn goes to this pool."""
        with self._lock:
            self._pools.append(pool)
            self._take_over()

    def leave(self, pool: Pool) -> None:
        """The next index that is drawn goes where it went before. What the pool was asked for comes from it
        still."""
        with self._lock:
            if pool in self._pools:
                self._pools.remove(pool)
            self._release()

    def deepen(self, depth: Depth) -> None:
        """More batches are asked for beforehand, of whoever makes them."""
        with self._lock:
            self._depths.append(depth)
            self._take_over()

    def shallow(self, depth: Depth) -> None:
        """As many batches are asked for as before, once those that were are handed out."""
        with self._lock:
            if depth in self._depths:
                self._depths.remove(depth)
            self._release()

    def collect(self, pool: Pool, patience_s: float) -> None:
        """Takes from a pool what it was asked for, so that it can be closed; what does not come in time is
        made in the training process, when its turn has come."""
        with self._lock:
            for entry in self._ahead:
                if isinstance(entry, Asked) and entry.pool is pool and entry.workers is not None:
                    entry.workers.patience_s = patience_s
                    entry.take()
                    entry.workers = None

    def started(self) -> None:
        """An epoch has begun. Workers of the script's would have been asked for batches by now."""
        batches = self._batches()
        if self._num_workers:
            with self._lock:
                self._begin_if_new(batches)
                self._fill(batches, asked=0)

    @property
    def in_force(self) -> tuple[Pool | Depth, ...]:
        """What actions have put in force."""
        return (*self._pools, *self._depths)

    @property
    def active(self) -> Pool | None:
        """The pool that indices go to; `None` where the script itself makes the batches."""
        for pool in reversed(self._pools):
            if not pool.broken:
                return pool
        return None

    @property
    def factor(self) -> int:
        """Batches that each worker is asked for beforehand."""
        if self._depths:
            return self._depths[-1].factor
        return self._own_factor if self.active is None else self.active.prefetch_factor

    @property
    def is_idle(self) -> bool:
        """Whether nothing of ours has a part in the iterator any more."""
        ours = any(isinstance(entry, Asked | Failed) for entry in self._ahead)
        deeper = self._num_workers and len(self._ahead) > self._own_factor * self._num_workers
        return not (self.in_force or ours or deeper or self._early is not None)

    # -- what takes the place of torch's methods

    def _next_data(self) -> Any:
        batches = self._batches()
        with self._lock:
            self._begin_if_new(batches)
            self._fill(batches, asked=batches._num_yielded + 1)
            if self._ahead:
                data = self._hand_out(batches)
            elif self._ended and not self._num_workers:
                raise StopIteration
            else:
                data = type(batches)._next_data(batches)
            self._release()
        return data

    def _try_put_index(self) -> None:
        """The script's own workers may be asked for one more batch: not while a pool is."""
        batches = self._batches()
        self._begin_if_new(batches)
        if self.active is None:
            self._draw(batches, None, self._due(batches._num_yielded + 1))

    # -- the order of batches

    def _begin_if_new(self, batches: Any) -> None:
        if batches._sampler_iter is not self._sampling:
            self._begin(batches)

    def _begin(self, batches: Any) -> None:
        """A new epoch, or the first look: what was left of another epoch is forgotten."""
        forget(self._ahead)
        self._sampling = batches._sampler_iter
        self._streams = generators(batches._index_sampler)
        self._length = length(batches)
        self._early = None
        self._ended = False
        if self._num_workers:
            self._ahead.extend([OWN] * (batches._send_idx - batches._rcvd_idx))

    def _due(self, asked: int) -> int:
        """Returns how many indices would have been drawn by now without us."""
        return asked + self._own_factor * self._num_workers

    def _fill(self, batches: Any, asked: int) -> None:
        """Asks for batches ahead, as many as whoever makes them now is to be asked for.

        Args:
            batches: The iterator.
            asked: How many batches the loop has asked for in this epoch.
        """
        due = self._due(asked)
        if self._early is not None and self._early.position <= due:
            self._early.happens()
            self._early = None
        if not self._num_workers:
            self._refuse_stale(batches._dataset)
        pool = self.active
        if pool is None and not self._num_workers:
            return
        if pool is not None:
            mine = sum(isinstance(entry, Asked) and entry.pool is pool for entry in self._ahead)
            room = self.factor * pool.num_workers - mine
        else:
            # As torch counts: a batch that came before its turn is still ahead.
            room = self.factor * self._num_workers - sum(entry is OWN for entry in self._ahead)
        # No fewer than without us: a sampler that moves a generator at its end does so when it would have.
        room = max(room, due - batches._num_yielded - len(self._ahead))
        while room > 0 and self._draw(batches, pool, due):
            room -= 1

    def _draw(self, batches: Any, pool: Pool | None, due: int) -> bool:
        """Draws an index and asks for its batch: a pool, or the script's own workers.

        Returns:
            Whether that may be done once more. What a sampler does when it ends, such as drawing a random
            number of the process's, must not happen before it would have without us.
        """
        if self._ended or self._early is not None or (self._ahead and isinstance(self._ahead[-1], Failed)):
            return False
        drawn: int = batches._num_yielded + len(self._ahead)
        if self._length is not None and drawn >= max(self._length, due):
            return False
        if pool is None and batches._send_idx - batches._rcvd_idx >= self.factor * self._num_workers:
            return False  # the queue was deeper before
        before = [stream.get_state() for stream in self._streams] if drawn >= due else []
        try:
            if pool is not None:
                index = batches._next_index()
                self._ahead.append(Asked(pool, index))
            elif _is_asked(batches):
                self._ahead.append(OWN)
            else:
                self._ended = True
        except StopIteration:
            self._ended = True
        except Exception as error:
            if pool is None:
                raise  # where torch raises it
            self._ahead.append(Failed(error))
        self._early = Early.of(drawn + 1, self._streams, before)
        return True

    def _refuse_stale(self, dataset: Any) -> None:
        """Without workers, a change that the script makes to its dataset holds from the next batch on."""
        for pool in self._pools:
            if not pool.broken and pool.is_stale(dataset):
                pool.refused = "the script changes its dataset between two batches"
        for entry in self._ahead:
            if isinstance(entry, Asked) and entry.pool.is_stale(dataset):
                entry.workers, entry.data = None, NOTHING

    def _hand_out(self, batches: Any) -> Any:
        entry = self._ahead[0]
        if isinstance(entry, Own):
            received = batches._rcvd_idx
            try:
                return type(batches)._next_data(batches)
            finally:
                if batches._rcvd_idx != received:
                    self._ahead.popleft()
        data = entry.take() if isinstance(entry, Asked) else NOTHING
        self._ahead.popleft()  # only now: a wait that the user interrupts has consumed nothing
        if isinstance(entry, Failed):
            raise entry.error
        return self._checked(batches, entry, data)

    def _checked(self, batches: Any, entry: Asked, data: Any) -> Any:
        """Returns what the script would have got, or raises what it would have seen."""
        pool = entry.pool
        if isinstance(data, ExceptionWrapper) and self._num_workers:
            data.where = f"in DataLoader worker process {batches._num_yielded % self._num_workers}"
            data.reraise()
        if data is not NOTHING and not isinstance(data, Impure | ExceptionWrapper) and pool.proven:
            return data
        made = made_here(batches, entry.index)
        if isinstance(data, Impure):
            pool.refused = f"making a batch draws random numbers ({', '.join(data.drew)})"
        elif isinstance(data, ExceptionWrapper):
            pool.refused = f"a worker failed where the training process does not: {data.exc_type.__name__}"
        elif data is not NOTHING:
            pool.proven = same(data, made)
            if not pool.proven:
                pool.refused = "a worker's batch differs from the one that the training process makes"
        return made

    def _take_over(self) -> None:
        """Puts our methods into the iterator."""
        batches = self._batches()
        vars(batches)["_next_data"] = self._next_data
        if self._num_workers:
            vars(batches)["_try_put_index"] = self._try_put_index
            batches._prefetch_factor = self.factor if self.active is None else self._own_factor

    def _release(self) -> None:
        """Takes our methods out of the iterator when they have nothing left to do."""
        batches = self._batches()
        if batches is None:
            return
        if self._num_workers:
            batches._prefetch_factor = self.factor if self.active is None else self._own_factor
        if self.is_idle:
            vars(batches).pop("_next_data", None)
            vars(batches).pop("_try_put_index", None)
            _feeds.pop(batches, None)


def _is_asked(batches: Any) -> bool:
    """Lets the script's own workers be asked for a batch; returns whether there was one."""
    sent = batches._send_idx
    type(batches)._try_put_index(batches)
    return bool(batches._send_idx != sent)


_feeds: WeakKeyDictionary[Any, Feed] = WeakKeyDictionary()


def feed_of(batches: Any) -> Feed:
    """Returns the feed of an iterator; makes it if need be."""
    feed = _feeds.get(batches)
    if feed is None:
        feed = _feeds[batches] = Feed(batches)
    return feed


def feeds() -> Iterable[tuple[Any, Feed]]:
    """Returns the iterators that something of ours has a part in."""
    return list(_feeds.items())
