"""Keeps a loader's worker processes from one epoch to the next, where a script starts them anew in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from diagnose.actions._blame import raised_by_us
from diagnose.actions._loader_parts import Watch, weakly
from diagnose.actions._loader_pool import beside_training
from diagnose.actions._loader_probe import reseed_worker
from diagnose.hooks._signals import from_signal_handler
from diagnose.hooks.base import replaced

OF_WORKERS = (
    "_data_queue",
    "_in_order",
    "_index_queues",
    "_pin_memory_thread",
    "_pin_memory_thread_done_event",
    "_shutdown",
    "_worker_init_fn",
    "_worker_result_queue",
    "_workers",
    "_workers_done_event",
)
"""What an iterator hands over to the next: the workers, and all that leads to them. Without a thread that
pins memory, two of these are missing."""


class Reseeding:
    """Seeds the random number generators of the worker that unpickles it, as torch does in a new worker.

    It travels to the worker in place of a field of torch's message that an epoch begins.

    Args:
        base_seed: What the script's own iterator has drawn for this epoch.
    """

    def __init__(self, base_seed: int) -> None:
        self._base_seed = base_seed

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return reseed_worker, (self._base_seed,)


class End:
    """Takes the place of `_shutdown_workers`, which torch calls when an epoch has ended, or its iterator.

    Args:
        key: Under which torch watches the workers of that iterator.

    Attributes:
        came: Whether it was called: nobody takes batches from the workers any more.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self.came = False

    def __call__(self) -> None:
        """See above."""
        if not self.came:
            self.came = True
            # Workers that torch watches for longer than needed disturb nobody: they end as they should.
            with suppress(Exception):
                signal_handling._remove_worker_pids(self._key)  # type: ignore[attr-defined]


def functions(loader: Any) -> dict[str, Any]:
    """Returns what workers that begin now are given besides the dataset."""
    return {"collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}


_keepers: dict[int, Keeper] = {}
"""By the id of their loaders. The loaders know nothing of them: scripts copy and pickle loaders, which
would fail with the queues and processes of a keeper in them."""


def keeper_of(loader: Any) -> Keeper | None:
    """Returns what keeps the workers of a loader, if they are kept."""
    keeper = _keepers.get(id(loader))
    return keeper if keeper is not None and keeper.is_of(loader) else None


def makes_its_own(loader: Any) -> bool:
    """Whether a loader gets its iterators from elsewhere than from torch."""
    usual = getattr(DataLoader, "_get_iterator", None)
    own = getattr(type(loader), "_get_iterator", None)
    return usual is None or own is not usual or "_get_iterator" in vars(loader)


@contextmanager
def keeping() -> Iterator[None]:
    """While open, loaders that have a keeper get their iterators from it."""

    def wrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def _get_iterator(loader: Any) -> Any:
            keeper = keeper_of(loader)
            return original(loader) if keeper is None else keeper.begin(loader, original)

        return _get_iterator

    with replaced(DataLoader, "_get_iterator", wrap):
        yield


class Keeper:
    """Hands the workers of a loader's iterator to the next one, while `keeping`, until `end` is called.

    Args:
        watch: Tells whether the script has changed what workers are made from since they began.
        known: Whether it has been watched since those of this iterator began: else they end with it.
    """

    def __init__(self, loader: Any, batches: Any, watch: Watch, *, known: bool) -> None:
        self._loader = weakly(loader, self._dropped)
        self._watch = watch
        self._id = id(loader)
        self._keep(batches, known)
        _keepers[self._id] = self

    def is_of(self, loader: Any) -> bool:
        """Whether it is this loader's, and not that of one whose place it has taken in memory."""
        return self._loader() is loader

    def end(self) -> None:
        """The script's own iterators own their workers again."""
        if _keepers.get(self._id) is self:
            del _keepers[self._id]
        self._give_back()

    def _dropped(self) -> None:
        """The script is done with the loader: nothing is kept for another epoch."""
        self.end()
        self._watch = Watch(None)

    def _keep(self, batches: Any, known: bool = True) -> None:
        """Takes note of an iterator's workers: its end is not theirs."""
        self._batches: Callable[[], Any] = ref(batches)
        self._workers: dict[str, Any] = {}
        self._end = End(id(batches))
        if known and not batches._shutdown:
            self._workers = {name: vars(batches)[name] for name in OF_WORKERS if name in vars(batches)}
            vars(batches)["_shutdown_workers"] = self._end

    def _give_back(self) -> None:
        """The workers end with their iterator, or now if it has ended."""
        self._let_go()
        if self._workers and self._end.came:
            batches = object.__new__(_MultiProcessingDataLoaderIter)
            vars(batches).update(self._workers, _worker_pids_set=False, _pin_memory=False)
            batches._persistent_workers = True  # else it asserts that none has ended
            batches._workers_status = [True] * len(batches._workers)
            beside_training(batches._shutdown_workers)
        self._workers = {}

    def _let_go(self) -> None:
        """The iterator that has had the workers is as torch made it; one that has ended has ended them."""
        batches = self._batches()
        if batches is not None and self._workers:
            vars(batches).pop("_shutdown_workers", None)
            batches._shutdown = self._end.came
            batches._worker_pids_set = not self._end.came

    def begin(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        """Takes the place of `DataLoader._get_iterator`: the script begins an epoch."""
        stream = torch.default_generator if loader.generator is None else loader.generator
        before = stream.get_state()
        batches = None
        self._changed = False
        try:
            self._changed = self._watch.has_changed(**functions(loader)) or bool(self._watch.unseen)
            if self._can_go_on(loader):
                batches = self._handed_over(loader)
        except Exception as error:  # ours: the script gets what it would have got
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            stream.set_state(before)
        if batches is None:
            self._ours(self._give_back)
            batches = original(loader)
        else:
            self._ours(self._let_go)
        self._ours(self._keep, batches)
        if self._changed:
            self._ours(self._watch.renew, **functions(loader))
        return batches

    def _ours(self, work: Callable[..., None], *args: Any, **named: Any) -> None:
        """Does something of ours; where that fails the workers end with their iterator, as without us."""
        try:
            work(*args, **named)
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._workers = {}

    def _can_go_on(self, loader: Any) -> bool:
        # An iterator that has not ended may be in use still. A dataset that was changed needs new workers.
        if not self._workers or not self._end.came or self._changed:
            return False
        workers = self._workers["_workers"]
        return len(workers) == loader.num_workers and all(worker.is_alive() for worker in workers)

    def _handed_over(self, loader: Any) -> Any:
        batches = object.__new__(_MultiProcessingDataLoaderIter)
        vars(batches)["_shutdown_workers"] = _nothing  # whatever happens below, the workers are not its yet
        _BaseDataLoaderIter.__init__(batches, loader)  # draws the base seed, as a new one does
        vars(batches).update(self._workers, _prefetch_factor=loader.prefetch_factor)
        batches._shared_seed = Reseeding(int(batches._base_seed))
        batches._reset(loader)
        batches._shared_seed = None
        pids = tuple(worker.pid or 0 for worker in batches._workers)
        signal_handling._set_worker_pids(id(batches), pids)  # type: ignore[attr-defined]
        batches._worker_pids_set = True
        return batches


def _nothing() -> None:
    """Ends no workers."""
