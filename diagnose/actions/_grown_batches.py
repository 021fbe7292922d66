"""Makes a live loader hand out several of the script's batches as one, from the next index on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from diagnose.actions._careful import in_short
from diagnose.actions._loader_switch import feeds
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.hooks._looks import added
from diagnose.hooks.base import replaced

PRIVATE = (
    "_auto_collation",
    "_dataset",
    "_dataset_kind",
    "_drop_last",
    "_index_sampler",
    "_next_index",
    "_num_workers",
    "_num_yielded",
    "_sampler_iter",
)
"""Names of torch's iterators that are relied on."""

FEWEST_BATCHES = 4
"""Larger batches that an epoch is to have at least: the ends of epochs are steps of another size."""


def refuse_unfit(job: Job) -> None:
    """Raises `CannotApply` if the batches of the job's loader cannot be put together."""
    datasets = {id(getattr(batches, "_dataset", batches)) for batches in job.iterators}
    if not job.iterators:
        raise CannotApply("no DataLoader feeds the training loop")
    if len(datasets) > 1:
        raise CannotApply("several loaders feed the training loop")
    batches = job.iterators[-1]
    missing = [name for name in PRIVATE if not hasattr(batches, name)]
    if missing or type(batches).__module__ != "torch.utils.data.dataloader":
        raise CannotApply(f"the loader's iterator is a {type(batches).__qualname__}, not one of torch's")
    if batches._dataset_kind != _DatasetKind.Map:
        raise CannotApply("an IterableDataset decides by itself which samples come next")
    if not batches._auto_collation:
        raise CannotApply("the loader makes no batches: each of its samples is one")
    if type(batches._index_sampler) is not BatchSampler:
        kind = type(batches._index_sampler).__qualname__
        raise CannotApply(f"the script puts its batches together itself, with a {kind}")


class GrownBatches:
    """The batches of a job's loader, larger than the script asked for.

    Indices still come from the script's sampler, in its order: a larger batch is what it gave for several,
    one after the other. The last one of an epoch has as many as are left.

    Args:
        job: A job that `refuse_unfit` lets pass.

    Attributes:
        refused: Why batches are the script's own after all; empty while they are not.
    """

    def __init__(self, job: Job) -> None:
        self.refused = ""
        self._samplers: WeakSet[Any] = WeakSet()
        self._dataset_id = id(job.iterators[-1]._dataset)
        self._drawn: WeakKeyDictionary[Any, _Drawn] = WeakKeyDictionary()
        self._latest = 1.0
        self._of(job.iterators[-1])

    @contextmanager
    def installed(self, size: int, job: Job) -> Iterator[None]:
        """Lets every index that is drawn meanwhile be one of a larger batch.

        Args:
            size: How many of the script's batches make one.
        """

        def wrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def next_index(batches: Any) -> Any:
                if self.refused or batches._index_sampler not in self._samplers:
                    return original(batches)
                index = list(original(batches))
                parts = 1
                while parts < size:
                    try:
                        index.extend(original(batches))
                    except StopIteration:
                        break
                    parts += 1
                try:
                    self._of(batches).parts.append(parts)
                except Exception as error:  # noqa: BLE001 (ours: the script gets what was drawn for it)
                    self.failed(error)
                return index

            return next_index

        def begins(loader: Any, batches: Any) -> None:
            # A loader that is made anew for an epoch has drawn what its workers are to begin with.
            if id(getattr(batches, "_dataset", None)) == self._dataset_id:
                self._adopt(batches)

        for batches in job.iterators:
            self._adopt(batches)
        del batches
        with replaced(_BaseDataLoaderIter, "_next_index", wrap), added(job.on_iterator, begins):
            yield

    def parts(self) -> float:
        """Returns how many of the script's batches the latest one is made of: the mean, where the loop took
        several since it was asked last."""
        for batches, drawn in list(self._drawn.items()):
            if taken := drawn.taken(batches):
                self._latest = sum(taken) / len(taken)
        return self._latest

    def failed(self, error: Exception) -> None:
        """Something of ours has failed: batches are the script's own from the next index on."""
        self.refused = self.refused or f"it failed in use: {in_short(error)}"

    def _adopt(self, batches: Any) -> None:
        self._samplers.add(batches._index_sampler)
        drawn = self._of(batches)
        drawn.taken(batches)
        drawn.parts.extend([1] * (_ahead(batches) - len(drawn.parts)))

    def _of(self, batches: Any) -> _Drawn:
        drawn = self._drawn.get(batches)
        if drawn is None or drawn.sampling is not batches._sampler_iter:
            drawn = self._drawn[batches] = _Drawn(batches)
        return drawn


class _Drawn:
    """What was drawn in one epoch of an iterator and has not been handed out, as far as we know.

    Attributes:
        sampling: The epoch.
        parts: How many of the script's batches each is made of, the next one first.
    """

    def __init__(self, batches: Any) -> None:
        self.sampling = batches._sampler_iter
        self.parts: deque[int] = deque()
        self._handed: int = batches._num_yielded

    def taken(self, batches: Any) -> list[int]:
        """Returns the parts of what was handed out since the last time."""
        if self.sampling is not batches._sampler_iter:
            return []
        handed, self._handed = batches._num_yielded - self._handed, batches._num_yielded
        return [self.parts.popleft() for _ in range(min(handed, len(self.parts)))]


def _ahead(batches: Any) -> int:
    """Returns how many batches have been drawn and not handed out."""
    for known, feed in feeds():
        if known is batches:
            return feed.num_ahead
    return int(batches._send_idx - batches._rcvd_idx) if batches._num_workers else 0
