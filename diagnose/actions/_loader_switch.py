"""Where the batches of one of the script's iterators come from, switched between two batches.

torch's `__next__` calls `self._next_data()`. An attribute of that name on the iterator itself takes its
place; everything else about the iterator stays the script's: its type, length, warnings, sampler. Indices
are drawn from the sampler in one order whoever makes the batches, and batches are handed out in that order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

from torch._utils import ExceptionWrapper

from diagnose.actions._blame import raised_by_us
from diagnose.actions._careful import in_short
from diagnose.actions._loader_ahead import (
    NOTHING,
    Asked,
    Depth,
    Failed,
    Own,
    made_here,
    own_if_there,
)
from diagnose.actions._loader_order import Order
from diagnose.actions._loader_pool import Impure, Pool
from diagnose.actions._loader_purity import same

COUNT_FILES_EVERY = 16
"""Batches between two looks at how many files are open."""

Part: TypeAlias = "Pool | Depth | Callable[[Feed, Any], Any]"
"""What can be in force: workers that make the batches, more batches to be asked of each worker beforehand,
and what each batch goes through before the script gets it."""


class Feed:
    """Hands out the batches of one iterator of the script's.

    Args:
        batches: The iterator. It is not kept alive.

    Attributes:
        in_force: What actions have put in force, the latest last.
    """

    def __init__(self, batches: Any) -> None:
        self._batches: Callable[[], Any] = ref(batches)
        self._order = Order(batches)
        self._num_workers = self._order.num_workers
        self.in_force: list[Part] = []
        self._lock = threading.RLock()  # some scripts fetch in a thread of their own

    # -- what actions call, between two batches

    def put(self, part: Part) -> None:
        """Puts something in force, unless it is: from the next index that is drawn, or batch handed out."""
        with self._lock:
            if part not in self.in_force:
                self.in_force.append(part)
                self._take_over()

    def take_out(self, part: Part) -> None:
        """Takes it back. What a pool was asked for comes from it still."""
        with self._lock:
            if part in self.in_force:
                self.in_force.remove(part)
            self._release()

    def next_if_there(self) -> Any:
        """Returns the batch that comes next, which stays where it is; `NOTHING` if it is not there yet."""
        batches = self._batches()
        entry = self._order.ahead[0] if self._order.ahead else None
        data = NOTHING
        if isinstance(entry, Own) or (isinstance(entry, Asked) and entry.both):
            data = own_if_there(batches)
        elif isinstance(entry, Asked) and entry.pool.proven:
            data = entry.if_there()
        return NOTHING if isinstance(data, Impure | ExceptionWrapper) else data

    def collect(self, pool: Pool, patience_s: float) -> None:
        """Takes from a pool what it was asked for, so that it can be closed; what does not come in time is
        made in the training process, when its turn has come."""
        with self._lock:
            for entry in self._order.ahead:
                if isinstance(entry, Asked) and entry.pool is pool and entry.workers is not None:
                    entry.workers.patience_s = patience_s
                    if not entry.both:
                        entry.take()
                    entry.workers = None

    def started(self) -> None:
        """An epoch has begun. Workers of the script's would have been asked for batches by now."""
        batches = self._batches()
        if self._num_workers:
            with self._lock:
                self._order.begin_if_new(batches)
                self._fill(batches, 0)

    @property
    def _pools(self) -> list[Pool]:
        return [part for part in self.in_force if isinstance(part, Pool)]

    @property
    def active(self) -> Pool | None:
        """The pool that indices go to; `None` where the script itself makes the batches."""
        return next((pool for pool in reversed(self._pools) if not pool.broken), None)

    @property
    def num_ahead(self) -> int:
        """Batches that were asked for and are still to be handed out."""
        return len(self._order.ahead)

    @property
    def factor(self) -> int:
        """Batches that each worker is asked for beforehand."""
        depths = [part for part in self.in_force if isinstance(part, Depth)]
        if depths:
            return depths[-1].factor
        return self._order.own_factor if self.active is None else self.active.prefetch_factor

    @property
    def is_idle(self) -> bool:
        """Whether nothing of ours has a part in the iterator any more."""
        ours = any(isinstance(entry, Asked | Failed) for entry in self._order.ahead)
        deeper = self._num_workers and len(self._order.ahead) > self._order.own_factor * self._num_workers
        return not (self.in_force or ours or deeper or self._order.early is not None)

    # -- what takes the place of torch's methods

    def _next_data(self) -> Any:
        batches = self._batches()
        with self._lock:
            try:
                data = self._taken(batches)
            except Exception as error:
                if not self._gives_up(error):
                    raise
                data = self._taken(batches)  # nothing was handed out
            return self._finished(data)

    def _try_put_index(self) -> None:
        """The script's own workers may be asked for one more batch: not while a pool is."""
        batches = self._batches()
        try:
            self._order.begin_if_new(batches)
            if self.active is None:
                due = self._order.due(self._order.handed + 1)
                self._order.draw(batches, None, self.factor, due)
        except Exception as error:  # torch holds a batch then, which would be lost
            if not self._gives_up(error):
                raise

    # -- handing out

    def _taken(self, batches: Any) -> Any:
        """Takes the next batch from wherever it is made. Where something of ours fails, none is taken."""
        self._order.begin_if_new(batches)
        if not self._num_workers:
            self._refuse_stale()
        asked = self._order.handed + 1
        if not self._order.ahead:
            self._order.fill(batches, self.active, self.factor, asked)
        if self._order.ahead:
            try:
                return self._hand_out(batches)
            finally:
                # As torch does: when a batch is there, another one is asked for.
                if self._order.handed == asked:
                    self._fill(batches, asked)
        if self._order.ended and not self._num_workers:
            raise StopIteration
        return type(batches)._next_data(batches)

    def _finished(self, data: Any) -> Any:
        """What is done with a batch that is taken; it is not lost if that fails."""
        try:
            pool = self.active
            if pool is not None and not self._num_workers and not self._order.handed % COUNT_FILES_EVERY:
                pool.count_files()
            self._release()
            for part in self.in_force:
                if not isinstance(part, Pool | Depth):
                    data = part(self, data)
        except Exception as error:
            if not self._gives_up(error):
                raise
        return data

    def _fill(self, batches: Any, asked: int) -> None:
        try:
            self._order.fill(batches, self.active, self.factor, asked)
        except Exception as error:
            if not self._gives_up(error):
                raise

    def _gives_up(self, error: Exception) -> bool:
        """If the exception is ours, gives up. Returns whether it is."""
        if not raised_by_us(error) or isinstance(error, StopIteration):
            return False
        self._give_up(error)
        return True

    def _give_up(self, error: Exception) -> None:
        """Nobody is asked for batches any more: what was drawn is made in the training process."""
        for pool in self._pools:
            pool.refused = pool.refused or f"it failed in use: {in_short(error)}"
        for entry in self._order.ahead:
            if isinstance(entry, Asked):
                entry.workers = None

    def _refuse_stale(self) -> None:
        """Without workers, a change that the script makes to its dataset holds from the next batch on."""
        asked = [entry for entry in self._order.ahead if isinstance(entry, Asked)]
        stale = {pool for pool in {*self._pools, *(entry.pool for entry in asked)} if pool.is_stale()}
        for pool in stale:
            pool.refused = pool.refused or "the script changes its dataset between two batches"
        for entry in asked if stale else ():
            if entry.pool in stale:
                entry.workers, entry.data = None, NOTHING

    def _hand_out(self, batches: Any) -> Any:
        entry = self._order.ahead[0]
        if isinstance(entry, Own) or (isinstance(entry, Asked) and entry.both):
            received = batches._rcvd_idx
            try:
                made = type(batches)._next_data(batches)
            finally:
                if batches._rcvd_idx != received:
                    self._order.pop()
            if isinstance(entry, Asked):
                self._compare(entry, made)
            return made
        if isinstance(entry, Failed):
            self._order.pop()
            raise entry.error
        data = entry.take()
        try:
            found = self._checked(batches, entry, data)
        except BaseException as error:
            if not raised_by_us(error):
                self._order.pop()
            raise
        self._order.pop()  # only now: a wait that the user interrupts has consumed nothing
        return found

    def _checked(self, batches: Any, entry: Asked, data: Any) -> Any:
        """Returns what the script would have got, or raises what it would have seen."""
        pool = entry.pool
        data = pool.received(data)
        if isinstance(data, ExceptionWrapper) and self._num_workers:
            data.where = f"in DataLoader worker process {batches._num_yielded % self._num_workers}"
            data.reraise()
        if data is not NOTHING and not isinstance(data, Impure | ExceptionWrapper) and pool.proven:
            return data
        made = made_here(batches, entry.index)
        self._judge(pool, data, made)
        return made

    def _compare(self, entry: Asked, made: Any) -> None:
        """The script's own workers have made a batch that ours were asked for, too."""
        try:
            data = entry.pool.received(entry.if_there())
            if entry.workers is not None:
                entry.workers.forget([entry.number])
        except Exception as error:  # noqa: BLE001 (whosever it is: the script compares nothing)
            self._give_up(error)
        else:
            self._judge(entry.pool, data, made)

    def _judge(self, pool: Pool, data: Any, made: Any) -> None:
        """Compares what a worker of ours has sent with the batch that the script gets, which is not lost if
        that fails."""
        try:
            if isinstance(data, Impure):
                pool.refused = f"making a batch draws random numbers ({', '.join(data.drew)})"
            elif isinstance(data, ExceptionWrapper):
                pool.refused = f"a worker failed where the script does not: {data.exc_type.__name__}"
            elif data is not NOTHING:
                pool.compared(same(data, made))
        except Exception as error:  # noqa: BLE001 (likewise)
            self._give_up(error)

    def _take_over(self) -> None:
        """Puts our methods into the iterator."""
        batches = self._batches()
        vars(batches)["_next_data"] = self._next_data
        if self._num_workers:
            vars(batches)["_try_put_index"] = self._try_put_index
            batches._prefetch_factor = self.factor if self.active is None else self._order.own_factor

    def _release(self) -> None:
        """Takes our methods out of the iterator when they have nothing left to do."""
        batches = self._batches()
        if batches is None:
            return
        if self._num_workers:
            batches._prefetch_factor = self.factor if self.active is None else self._order.own_factor
        if self.is_idle:
            vars(batches).pop("_next_data", None)
            vars(batches).pop("_try_put_index", None)
            _feeds.pop(batches, None)


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
