"""Worker processes of ours, which make whatever batches of one loader they are told to make."""

from __future__ import annotations

import functools
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from queue import Empty
from typing import Any, ClassVar

import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from diagnose.actions._loader_parts import Watch, weakly
from diagnose.actions._loader_probe import quiet_fork
from diagnose.actions._loader_purity import open_sockets, silence
from diagnose.hooks._drawing import moved, random_states
from diagnose.hooks._signals import from_signal_handler

POLL_S = 0.5
"""So often a wait for a batch looks whether the workers are still there."""

PATIENCE = 20.0
LEAST_PATIENCE_S = 30.0
"""Workers that make nothing for so many times what a batch takes, and for so long, hang."""

LOCK_S = 5.0
"""A worker that holds a lock for so long is dead: it takes it for a look at a flag."""

PROOF_SHARE = 0.005
"""Making a batch a second time, to compare it, may take this part of the time between two comparisons."""

MAX_FILES_SHARE = 0.5
"""Of the files that a process may have open, so many may be: the other half is the script's."""


class Broken(Exception):
    """The workers cannot be relied upon any more; the message says why. No batch is lost: its indices are
    known, and it can be made in the training process."""


class Impure:
    """What a worker sends instead of a batch that it could not make as the training process would have.

    Args:
        drew: Random number generators that making it moved.
    """

    def __init__(self, drew: tuple[str, ...]) -> None:
        self.drew = drew


class Watched:
    """Stands for `collate_fn` in a worker, and notices when making a batch has drawn random numbers.

    Those would have come from the training process's generators without workers, and from other ones in
    each worker: the samples would not be the same.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._states: dict[str, int] = {}

    def begins(self, worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
        """The worker begins; its generators are seeded."""
        if worker_init_fn is not None:
            worker_init_fn(worker_id)
        self._states = random_states()

    def __call__(self, samples: Any) -> Any:
        """Collates; the samples were fetched just before."""
        batch = self._collate_fn(samples)
        states = random_states()
        drew = moved(self._states, states)
        self._states = states
        return Impure(drew) if drew else batch


class View:
    """A loader as our workers shall see it, without a change to the script's.

    Args:
        changed: Attributes in place of the loader's.
    """

    def __init__(self, loader: Any, changed: dict[str, Any]) -> None:
        self._loader = loader
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Workers(_MultiProcessingDataLoaderIter):
    """Processes that run torch's own worker loop. Batches are asked of them one by one, by number.

    Attributes:
        patience_s: So long a batch is waited for.
        broken: Why nothing is to be asked of them any more; empty while it may.
    """

    def __init__(self, view: View) -> None:
        self.patience_s = LEAST_PATIENCE_S
        self.broken = ""
        self._waiting_since = 0.0
        self._numbers = itertools.count()
        self._wanted: set[int] = set()
        self._arrived: dict[int, Any] = {}
        handler, theirs = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
        try:
            super().__init__(view)
        finally:
            # torch would raise out of the script's own code when one of them dies: the script has asked for
            # no such worker. We notice it, too.
            if self.__dict__.get("_worker_pids_set"):
                signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
                self._worker_pids_set = False
            if not theirs and signal_handling._SIGCHLD_handler_set:
                signal.signal(signal.SIGCHLD, handler)
                signal_handling._SIGCHLD_handler_set = False
        vars(self).update(_dataset=None, _collate_fn=None, _worker_init_fn=None)  # the processes have them

    def ask(self, index: Any) -> int:
        """Lets the next worker in turn make the batch of these indices; returns its number."""
        number = next(self._numbers)
        self._index_queues[number % self._num_workers].put((number, index))
        self._wanted.add(number)
        return number

    def get(self, number: int) -> Any:
        """Waits for a batch; an exception of the dataset's comes as torch's `ExceptionWrapper`.

        Raises:
            Broken: If it will not come. Nothing else will, either.
        """
        self._waiting_since = time.monotonic()
        while number not in self._arrived:
            if self.broken:
                raise Broken(self.broken)
            self._take_in(self._get_data)
        self._wanted.discard(number)
        return self._arrived.pop(number)

    def has_come(self, number: int) -> bool:
        """Whether a batch is there without waiting. One whose worker has died since cannot be unpacked."""
        while number not in self._arrived and not self.broken:
            try:
                self._take_in(self._data_queue.get_nowait)
            except Empty:
                break
        return number in self._arrived

    def _take_in(self, receive: Callable[[], tuple[int, Any]]) -> None:
        try:
            arrived, data = receive()
        except Empty:
            raise
        except Exception as error:
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            self.give_up(str(error))
            return
        if arrived in self._wanted:
            self._arrived[arrived] = data

    def forget(self, numbers: Collection[int]) -> None:
        """Nobody will ask for these batches."""
        self._wanted.difference_update(numbers)
        for number in numbers:
            self._arrived.pop(number, None)
        for queue in self._index_queues if numbers else ():
            # What no worker has begun need not be made.
            waiting = []
            with suppress(Empty, OSError, ValueError):
                while True:
                    waiting.append(queue.get_nowait())
            for each in waiting:
                if each is not None and each[0] in self._wanted:
                    queue.put(each)

    def give_up(self, reason: str) -> None:
        """What has not come is not waited for any more."""
        self.broken = self.broken or reason

    def stop(self) -> None:
        """Ends the processes, beside the training thread."""
        self.give_up("the workers were stopped")
        beside_training(self._shutdown_workers)

    def _try_get_data(self, timeout: float = POLL_S) -> Any:
        waited_s = time.monotonic() - self._waiting_since
        if waited_s > self.patience_s:
            raise Broken(f"the workers made no batch for {waited_s:.0f} s")
        return super()._try_get_data(POLL_S)  # type: ignore[no-untyped-call]

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        # torch looks at a flag here whose lock a worker that was killed may have taken with it.
        if not shutdown:
            raise Broken("a worker has died")
        super()._mark_worker_as_unavailable(worker_id, shutdown)

    def _shutdown_workers(self) -> None:
        if not self._shutdown and "_workers_done_event" in vars(self):
            lock = self._workers_done_event._cond  # type: ignore[attr-defined]
            if not lock.acquire(True, LOCK_S):
                self._kill()
                return
            lock.release()
        super()._shutdown_workers()

    def _kill(self) -> None:
        self._shutdown = True
        for worker in self._workers:
            worker.kill()
        for queue in (*self._index_queues, self._worker_result_queue):
            queue.cancel_join_thread()
            queue.close()


def beside_training(end_workers: Callable[[], None]) -> None:
    """Ends workers, which may take as long as the batch that they are at, without stopping the training."""
    if is_ending():
        end_workers()
    else:
        threading.Thread(target=end_workers, name="end-of-loader-workers").start()


def is_ending() -> bool:
    """Whether the script is over: no thread can be started any more, and nobody waits for a batch."""
    return not threading.main_thread().is_alive() or sys.is_finalizing()


def begin_apart(sockets: Mapping[int, int], init: Callable[[int], None] | None, worker_id: int) -> None:
    """A worker of ours begins: it says nothing on the training process's connections."""
    silence(sockets)
    if init is not None:
        init(worker_id)


class Pool:
    """Workers for one loader, started anew where the script has changed what they make batches from.

    Args:
        prefetch_factor: Batches that are asked of each beforehand.
        exact: Whether a batch that drew random numbers is refused, and one compared now and then.
        batch_s: What one takes to make, as far as is known.

    Attributes:
        refused: Why its batches are not to be used any more; empty while they are.
        is_over: Whether the script is done with the dataset.
        proven: Whether a batch of its workers has been compared lately with one that the script would have
            had without them.
        workers: The processes, as they are now.
    """

    workers: Workers
    kind: ClassVar[type[Workers]] = Workers

    def __init__(
        self,
        loader: Any,
        batches: Any,
        *,
        num_workers: int,
        prefetch_factor: int,
        exact: bool = True,
        batch_s: float = 0.0,
    ) -> None:
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.refused = ""
        self.is_over = False
        self.proven = not exact
        self._doubted = self._is_stale = False
        self._has_own = batches._num_workers > 0
        self._proven_at = time.monotonic()
        self._exact = exact
        self._batch_s = batch_s
        self._patience_s = max(LEAST_PATIENCE_S, PATIENCE * batch_s)
        self._dataset = weakly(batches._dataset, self._dropped)
        self._collate_fn = weakly(batches._collate_fn)
        self.workers = self._start(loader, batches)

    def received(self, data: Any) -> Any:
        """The turn of a batch has come: returns what is to be handed out of what the workers sent."""
        return data

    @property
    def broken(self) -> str:
        """Why nothing is asked of it any more; empty while it is."""
        return self.refused or self.workers.broken

    def count_files(self) -> None:
        """Gives up where the script keeps its batches: each tensor from a worker is an open file as long as
        it lives, and a process may have so many."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError):
            if len(os.listdir("/proc/self/fd")) > MAX_FILES_SHARE * most:
                self.refused = f"the script keeps its batches, and a process may have {most} open files"

    def fits(self, batches: Any) -> bool:
        """Whether it makes the batches of an iterator: of the same loader, or of one made again alike."""
        return batches._dataset is self._dataset() and batches._collate_fn == self._collate_fn()

    def refresh(self, loader: Any, batches: Any) -> None:
        """An epoch begins: where the script has changed what batches are made from, new workers get it as
        it is now, as new ones of the script's would."""
        kept, init = batches._num_workers and loader.persistent_workers, loader.worker_init_fn
        changed = not kept and (self._is_stale or self._watch.has_changed(worker_init_fn=init))
        if changed or (not kept and self._watch.unseen):
            self.workers.stop()
            self.workers = self._start(loader, batches, is_seen=not changed)
        elif self._is_due:
            # Beside workers of the script's, a proof costs the training process nothing, and ours go on.
            self.proven, self._doubted = self.proven and self._has_own, True

    @property
    def _is_due(self) -> bool:
        """Whether it has been long since a batch was compared."""
        return self._exact and (time.monotonic() - self._proven_at) * PROOF_SHARE > self._batch_s

    @property
    def wants_proof(self) -> bool:
        """Whether one of its batches is to be compared."""
        return not self.proven or self._doubted

    def compared(self, equal: bool) -> None:
        """A batch of its workers was compared with the script's own."""
        self.proven, self._doubted = equal, False
        self._proven_at = time.monotonic()
        if not equal:
            self.refused = "a worker's batch differs from the one that the script makes"

    def is_stale(self) -> bool:
        """Whether what batches are made from has changed since the workers began, as far as there is time
        to look between two batches. Where that could change unseen, a batch is compared now and then."""
        if self._watch.unseen and self._is_due:
            self.proven = False
        self._is_stale = self._is_stale or self._watch.has_changed_now()
        return self._is_stale

    def _dropped(self) -> None:
        """The script is done with the dataset."""
        self.is_over, self._watch = True, Watch(None)
        self.workers.give_up("the script is done with the dataset")
        self.workers.stop()

    def _start(self, loader: Any, batches: Any, *, is_seen: bool = False) -> Workers:
        collate_fn, init = batches._collate_fn, None
        if batches._num_workers:
            init = loader.worker_init_fn  # where there are no workers, the script's is never called
        if self._exact:
            collate_fn, init = self._seen(collate_fn, init)
        init = functools.partial(begin_apart, open_sockets(), init)
        seeds = torch.Generator()
        seeds.set_state(torch.get_rng_state())  # reproducible, and the script's own stream stays put
        if not is_seen:
            self._watch = Watch(
                batches._dataset, collate_fn=batches._collate_fn, worker_init_fn=loader.worker_init_fn
            )
        self._is_stale, self.proven = False, not self._exact
        changed = {
            "dataset": batches._dataset,
            "collate_fn": collate_fn,
            "worker_init_fn": init,
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": True,
            "timeout": 0,
            "in_order": True,
            "generator": seeds,
            "pin_memory": batches._pin_memory,
            "multiprocessing_context": torch.multiprocessing.get_context("fork"),
            "_index_sampler": (),  # indices come from the script's own sampler, one by one
        }
        with quiet_fork():
            workers = self.kind(View(loader, changed))
        workers.patience_s = self._patience_s
        return workers

    def _seen(
        self, collate_fn: Callable[[Any], Any], init: Callable[[int], None] | None
    ) -> tuple[Callable[[Any], Any], Callable[[int], None] | None]:
        """Returns what stands for `collate_fn` and `worker_init_fn` where batches must be the script's."""
        watched = Watched(collate_fn)
        return watched, functools.partial(watched.begins, init)
