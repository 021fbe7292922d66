"""In which order batches come, whoever makes them: the order in which the script's sampler names them."""

from __future__ import annotations

from collections import deque
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from diagnose.actions._loader_ahead import NOTHING, OWN, Ahead, Asked, Early, Failed, ask_own, forget
from diagnose.actions._loader_parts import Watch
from diagnose.actions._loader_pool import Pool
from diagnose.actions._loader_purity import generators
from diagnose.actions._loader_sampler import followed, length, not_torchs

CALM_BATCHES = 3
"""A sampler of the script's own is asked ahead when so many batches were handed out and nobody else had
changed it, nor drawn from its generator; and if one of its class was followed to the end of an epoch."""


class Habits:
    """What has been seen of a sampler that is not torch's.

    Attributes:
        calm: Batches that were handed out without a change that is not the sampler's own.
        meddled: Whether somebody else has changed it, or drawn from its generator.
    """

    def __init__(self) -> None:
        self.calm = 0
        self.meddled = False


_habits: WeakKeyDictionary[Any, Habits] = WeakKeyDictionary()


def habits_of(sampler: Any) -> Habits:
    """Returns what has been seen of a sampler so far."""
    try:
        return _habits.setdefault(sampler, Habits())
    except TypeError:  # a list of batches has no weak references
        return Habits()


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
        self._epoch: tuple[Any, ...] = (None, None)
        self._streams: list[Any] = []
        self._length: int | None = None
        self._is_torchs = True
        self._kind: type = type(None)
        self._habits = Habits()
        self._watch: Watch | None = None
        self._left: list[Any] | None = None
        finalize(batches, forget, self.ahead).atexit = False
        self.begin_if_new(batches)

    def begin_if_new(self, batches: Any) -> None:
        """Where an epoch has begun: what was left of another one is forgotten."""
        # A sampler may be its own iterator; torch's table of tasks is another one in each epoch.
        epoch = batches._sampler_iter, getattr(batches, "_task_info", None)
        if all(map(is_, epoch, self._epoch)):
            return
        forget(self.ahead)
        self._epoch = epoch
        self._streams, self._length = [], None
        self._watch = self._left = None
        self.early = None
        self.ended = False
        self.handed = batches._num_yielded
        if self.num_workers:
            self.ahead.extend([OWN] * (batches._send_idx - batches._rcvd_idx))
        # Last, because they look into objects of the script's.
        self._streams = generators(batches._index_sampler)
        self._length = length(batches._index_sampler)
        own = not_torchs(batches._index_sampler)
        self._is_torchs, self._kind = own is None, type(own)
        self._habits = habits_of(batches._index_sampler)

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
            pool: Who makes them; `None` is the script itself.
            factor: How many each worker is to be asked for beforehand.
            asked: How many batches the loop has asked for in this epoch.
        """
        due = self.due(asked)
        may_go_ahead = self._may_go_ahead(batches)
        if self.early is not None and self.early.position <= due:
            if not self._habits.meddled:
                self.early.happens()
            self.early = None
            self._note_streams()
        if pool is None and not self.num_workers:
            self._left = None  # torch itself draws
            return
        if pool is not None:
            mine = sum(isinstance(entry, Asked) and entry.pool is pool for entry in self.ahead)
            room = factor * pool.num_workers - mine
        else:
            # As torch counts: a batch that came before its turn is still ahead.
            room = factor * self.num_workers - sum(entry is OWN for entry in self.ahead)
        # No fewer than without us: a sampler that moves a generator at its end does so when it would have.
        least = due - self.handed - len(self.ahead)
        room = max(room, least) if may_go_ahead else least
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
        # With the last index a sampler may do what is to be seen when the epoch has ended.
        held = 0 if self._is_torchs and not self._streams else 1
        if self._length is not None and drawn >= max(self._length - held, due):
            return False
        both = pool is not None and self.num_workers > 0 and pool.wants_proof
        own_room = self.num_workers and self._own_room(batches, factor if pool is None else self.own_factor)
        if pool is None and not own_room:
            return False  # the queue was deeper before
        if both and not own_room:
            if not pool.proven:  # type: ignore[union-attr]
                return False
            both = False
        before = [stream.get_state() for stream in self._streams] if drawn >= due else []
        try:
            if pool is None or both:
                index = ask_own(batches)
                if index is NOTHING:
                    self.ended = True
                else:
                    self.ahead.append(OWN if pool is None else Asked(pool, index, both=True))
            else:
                self.ahead.append(Asked(pool, batches._next_index()))
        except StopIteration:
            self.ended = True
        except Exception as error:
            if pool is None or both:
                raise  # where torch raises it
            self.ahead.append(Failed(error))
        self.early = Early.of(drawn + 1, self._streams, before)
        self._note_streams()
        return True

    def _own_room(self, batches: Any, factor: int) -> bool:
        # torch refuses more than its own depth, which is set anew only when a batch was handed out.
        most = min(factor, batches._prefetch_factor) * self.num_workers
        return bool(batches._send_idx - batches._rcvd_idx < most)

    def _may_go_ahead(self, batches: Any) -> bool:
        """Whether more may be drawn than the loop has asked for: not from a sampler that anybody else
        changes meanwhile, or from whose generator he draws."""
        drawn = self.handed + len(self.ahead)
        if self._is_torchs or self.ended or (self._length is not None and drawn >= self._length):
            return True
        habits = self._habits
        if self._left is not None:
            drew = not all(map(torch.equal, self._left, [stream.get_state() for stream in self._streams]))
            if drew or (self._watch is not None and self._watch.has_changed_now()):
                habits.meddled = True
            habits.calm += 1
        if drawn and self._watch is None:  # the first index may begin an epoch
            self._watch = Watch(batches._index_sampler, draws=False)
        return habits.calm > CALM_BATCHES and not habits.meddled and self._kind in followed

    def _note_streams(self) -> None:
        if not self._is_torchs:
            self._left = [stream.get_state() for stream in self._streams]
