"""Samples that are the same in each epoch, kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import StackDataset, Subset, default_collate

from diagnose.actions._loader_choice import sources
from diagnose.actions._loader_parts import weakly
from diagnose.actions._loader_samples import Remembering, Samples
from diagnose.actions._memory import available_bytes
from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.core.units import format_bytes
from diagnose.hooks._looks import added

MEMORY_SHARE = 0.25
"""Of the memory that is available, so much may be filled with samples, on all ranks together."""


class DatasetCache(Action):
    """Keeps the samples of a dataset in memory, for a script that makes them anew in each epoch.

    ## What it does
    Remembers what the dataset returned for each index, and returns copies of it instead of asking again.
    The dataset and the loader are not changed: only the part of the iterator that fetches gets another
    source.

    ## When it takes effect
    When all samples have been made once with the action prepared: an epoch later.

    ## When it cannot help
    In the first epoch. Where the script's own workers make the batches; those that `loader-workers` has
    given it make way where this is to win more. Where a sample costs no more to make than to copy.

    ## When it is refused
    Where `loader-workers` is, for the same reasons: random samples, a dataset that changes itself. Where
    all samples would not fit into a quarter of the memory that is available. Where a sample holds other
    things than tensors, arrays, numbers and text. Where the dataset makes samples by the batch, with
    `__getitems__`: one may depend on the others, as padding does. A dataset that the script changes is read
    anew (`loader-workers` says what is seen), and in each epoch one sample is made again and compared.

    ## What it does not make permanent
    No setting of torch's does this. In the script, keep what the dataset returns, or write it to disk once.
    """

    safety = Safety.EXACT
    order = 20
    excludes = frozenset({"loader-workers", "loader-workers-reseeded"})

    def check(self, job: Job) -> None:
        _cache(job)
        epochs = max((known["epochs"] for known in job.facts.get("loaders", ())), default=0)
        if epochs < 2:
            raise NotYet("no sample has come a second time yet: the script is in its first epoch")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        cache = _cache(job)
        self.settle_steps = cache.num_batches

        def begins(loader: Any, batches: Any) -> None:
            if cache.samples.are_all_known:
                self.settle_steps = 1
            cache.samples.epoch_begins()
            cache.put(batches)

        try:
            for batches in job.iterators:
                cache.put(batches)
            del batches
            with added(job.on_iterator, begins):
                yield cache
        finally:
            cache.take_out()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        if prepared.samples.refused:
            raise CannotApply(prepared.samples.refused)
        try:
            prepared.serve(True)
            yield
        finally:
            prepared.serve(False)

    def state(self, job: Job) -> Any:
        fetchers = [batches._dataset_fetcher for batches in job.iterators if not batches._num_workers]
        views = [fetcher.dataset for fetcher in fetchers if isinstance(fetcher.dataset, Remembering)]
        return any(view.serving for view in views), any(view.is_over for view in views)


class Cache:
    """The samples of one dataset, and the iterators that fetch from them.

    Args:
        num_batches: Batches until a whole epoch has passed. What is left of this one is not enough: in
            another order the next begins with samples that were not among them.
        budget_bytes: Memory for samples.

    Attributes:
        samples: What is kept.
    """

    def __init__(self, dataset: Any, num_batches: int, budget_bytes: float) -> None:
        self.num_batches = num_batches
        self.samples = Samples(dataset, budget_bytes)
        self._dataset = weakly(dataset)
        self._serving = False
        self._views: WeakKeyDictionary[Any, Remembering] = WeakKeyDictionary()

    def put(self, batches: Any) -> None:
        """Lets an iterator fetch from here, if it fetches from the dataset in this process."""
        fetcher, dataset = getattr(batches, "_dataset_fetcher", None), self._dataset()
        if fetcher is not None and dataset is not None and fetcher.dataset is dataset:
            # torch's own function only copies from samples; another one may hand them out themselves.
            aliasing = batches._auto_collation and batches._collate_fn is default_collate
            view = Remembering(dataset, self.samples, aliasing=aliasing)
            view.serving = self._serving
            fetcher.dataset = self._views[batches] = view

    def serve(self, on: bool) -> None:
        """Hands out what is kept, or only keeps it."""
        self._serving = on
        for view in list(self._views.values()):
            view.serving = on

    def take_out(self) -> None:
        """Iterators fetch from the script's dataset again."""
        for batches, view in list(self._views.items()):
            view.is_over = True
            if batches._dataset_fetcher.dataset is view:
                batches._dataset_fetcher.dataset = view.dataset
        self._views.clear()


def _cache(job: Job) -> Cache:
    """Returns a cache, empty, for the first dataset that can have one.

    Raises:
        CannotApply: If there is none.
    """
    served = [source for source in sources(job) if not source.batches._num_workers]
    if not served:
        raise CannotApply("workers make the batches, each in a process of its own")
    batches, probed = served[0].batches, served[0].probed
    if batches._auto_collation and _makes_batches(batches._dataset):
        raise CannotApply("the dataset makes samples by the batch: they may depend on one another")
    num_bytes = probed.batch_bytes / max(1, probed.samples) * len(batches._dataset)
    budget = available_bytes() * MEMORY_SHARE / max(1, job.local_ranks)
    if num_bytes > budget:
        raise CannotApply(
            f"all samples take {format_bytes(num_bytes)}; a quarter of the memory is {format_bytes(budget)}"
        )
    left = -batches._num_yielded % len(batches)
    cache = Cache(batches._dataset, left + len(batches), budget)
    if cache.samples.refused:
        raise CannotApply(cache.samples.refused)
    return cache


def _makes_batches(dataset: Any) -> bool:
    """Whether samples come from a `__getitems__` that is not torch's: its own ones only ask for each."""
    if type(dataset) is Subset:
        return _makes_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        datasets = dataset.datasets
        return any(map(_makes_batches, datasets.values() if isinstance(datasets, dict) else datasets))
    return callable(getattr(dataset, "__getitems__", None))
