"""Whether samples that the training thread makes come out the same each time that it makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from threading import get_ident
from typing import Any
from weakref import WeakSet, ref

from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._worker_readings import WATCHED, checksum
from diagnose.hooks.base import Hook, hidden, unseen

TIMES = 3
"""A watched sample that has been seen so often is known: in that many epochs."""

MAX_LOADERS = 4
"""Loaders whose samples are watched; the first ones feed most steps."""


class RepeatedSamplesHook(Hook):
    """Sums up a few samples of the first batch of a loader without workers, and again when they come in a
    later epoch.

    The part of torch's iterator that fetches gets another `fetch` for the first batch, and from the second
    epoch on until these samples have come: a microsecond per batch. It is given no other one where somebody
    else has.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        watch = Watch(recorder)
        try:
            with added(recorder.looks.on_iterator, watch.begins):
                yield
        finally:
            watch.ends()


class Watch:
    """Puts itself in the place of the fetchers' `fetch`, and writes what it sees to
    `recorder.facts["own_sightings"]`: number of the loader, index and checksum.

    Args:
        recorder: Whose facts are written, and whose feed knows the loaders.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loaders: dict[int, Sightings] = {}
        self._fetchers: WeakSet[Any] = WeakSet()

    def begins(self, loader: Any, batches: Any) -> None:
        """The loop begins to iterate over a loader."""
        from torch.utils.data._utils.fetch import _MapDatasetFetcher

        fetcher = getattr(batches, "_dataset_fetcher", None)  # none when workers fetch
        number = self._recorder.feed.iterators.get(batches)
        if number is None or type(fetcher) is not _MapDatasetFetcher or "fetch" in vars(fetcher):
            return
        if number not in self._loaders and len(self._loaders) == MAX_LOADERS:
            return
        sightings = self._loaders.setdefault(number, Sightings())
        sightings.epoch_begins()
        if fetcher.auto_collation and not sightings.are_known:
            self._fetchers.add(fetcher)
            vars(fetcher)["fetch"] = self._watched(ref(fetcher), sightings)

    def ends(self) -> None:
        """Takes out what is in the place of a `fetch`."""
        for fetcher in self._fetchers:
            vars(fetcher).pop("fetch", None)
        self._fetchers.clear()

    def _watched(self, of: Callable[[], Any], sightings: Sightings) -> Callable[[Any], Any]:
        """Returns what to call instead of `fetch`; it keeps no fetcher alive."""
        recorder = self._recorder

        def fetch(indices: Any) -> Any:
            fetcher = of()
            looks, collate_fn = None, fetcher.collate_fn
            if get_ident() == recorder.thread:
                recorder.guarded(sightings.asked, indices)
                if sightings.places:
                    looks = fetcher.collate_fn = self._looking(fetcher, collate_fn, sightings)
            try:
                return type(fetcher).fetch(fetcher, indices)
            except BaseException as error:
                unseen(error)
                raise
            finally:
                if looks is not None and fetcher.collate_fn is looks:  # the dataset has raised
                    fetcher.collate_fn = collate_fn
                if sightings.have_all:
                    vars(fetcher).pop("fetch", None)

        return hidden(fetch)

    def _looking(self, fetcher: Any, collate_fn: Any, sightings: Sightings) -> Callable[[Any], Any]:
        """Returns what to call instead of a `collate_fn`, once."""
        recorder = self._recorder

        def collate(samples: Any) -> Any:
            fetcher.collate_fn = collate_fn
            recorder.guarded(sightings.fetched, samples)
            recorder.guarded(self._tell)
            try:
                return collate_fn(samples)
            except BaseException as error:
                unseen(error)
                raise

        return hidden(collate)

    def _tell(self) -> None:
        self._recorder.facts["own_sightings"] = [
            [number, index, sum_]
            for number, sightings in self._loaders.items()
            for index, sums in sightings.sums.items()
            for sum_ in sums
        ]


class Sightings:
    """The watched samples of one loader.

    Attributes:
        sums: Checksums of each, as often as it has come, by its index.
        places: Where in the batch that is fetched those of them are that are wanted, with their indices.
    """

    def __init__(self) -> None:
        self.sums: dict[int, list[int]] = {}
        self.places: list[tuple[int, int]] = []
        self._wanted: set[int] = set()
        self._first = True
        self._given_up = False

    @property
    def are_known(self) -> bool:
        """Whether nothing more is to be learned: each was seen often enough, or one came out differently,
        or none can be summed up."""
        return self._given_up or any(
            len(set(sums)) > 1 or len(sums) >= TIMES for sums in self.sums.values()
        )

    @property
    def have_all(self) -> bool:
        """Whether no further batch of this epoch is to be looked at."""
        return self._given_up or (not self._first and not self._wanted)

    def epoch_begins(self) -> None:
        """Another epoch begins: the samples may come again."""
        self._wanted = set(self.sums)

    def asked(self, indices: Any) -> None:
        """A batch is asked for."""
        self.places = []
        if not isinstance(indices, list) or not indices:
            self._given_up = True
        elif self._first:
            self._first = False
            chosen = range(0, len(indices), max(1, len(indices) // WATCHED))[:WATCHED]
            self.places = [(place, indices[place]) for place in chosen]
            self._given_up = not all(isinstance(index, Integral) for _, index in self.places)
        elif not self._wanted.isdisjoint(indices):
            self.places = [(place, index) for place, index in enumerate(indices) if index in self._wanted]
        if self._given_up:
            self.places = []

    def fetched(self, samples: Any) -> None:
        """Its samples are there, and will be made a batch of."""
        places, self.places = self.places, []
        for place, index in places:
            # What makes whole batches need not return one sample for each index.
            sum_ = checksum(samples[place]) if isinstance(samples, list) and place < len(samples) else None
            if sum_ is None:
                self._given_up = True
                return
            self._wanted.discard(index)
            self.sums.setdefault(int(index), []).append(sum_)
