"""Whether samples that the training thread makes come out the same each time that it makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

from diagnose.hooks._checksum import checksum
from diagnose.hooks._drawing import moved, random_states
from diagnose.hooks._identity import identity, is_same
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._worker_readings import WATCHED
from diagnose.hooks.base import Hook, hidden, unseen

TIMES = 3
"""A watched sample that has been seen so often is known: in that many epochs."""

MAX_LOADERS = 4
"""Loaders whose samples are watched; the first ones feed most steps."""

MAX_DATASETS = 4
"""Of a line that makes its loaders of ever new datasets, those of so many are watched: folds, shards."""


class RepeatedSamplesHook(Hook):
    """Sums up a few samples of the first batch of a loader without workers, and again when they come in a
    later epoch. Of a stream these are the first ones of each epoch.

    The part of torch's iterator that fetches gets another `fetch` for the first batch, and from the second
    epoch on until these samples have come: a microsecond per batch. It is given no other one where somebody
    else has. The batches that hold watched samples cost a look at the random number generators, too, twice
    some 50 us: what draws from them need not come out the same, however often it has.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
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
        self._facts = recorder.facts
        self._loaders: dict[int, Sightings] = {}
        self._fetches: WeakKeyDictionary[Any, Callable[[Any], Any]] = WeakKeyDictionary()

    def begins(self, loader: Any, batches: Any) -> None:
        """The loop begins to iterate over a loader."""
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

        fetcher = getattr(batches, "_dataset_fetcher", None)  # none when workers fetch
        number = self._recorder.feed.iterators.get(batches)
        fetchers = (_MapDatasetFetcher, _IterableDatasetFetcher)
        if number is None or fetcher is None or type(fetcher) not in fetchers or "fetch" in vars(fetcher):
            return
        if self._facts is not self._recorder.facts:  # a forked child numbers its loaders anew
            self._facts = self._recorder.facts
            self._loaders.clear()
        if number not in self._loaders and len(self._loaders) == MAX_LOADERS:
            return
        sightings = self._loaders.setdefault(number, Sightings())
        sightings.epoch_begins(fetcher.dataset)
        if fetcher.auto_collation and not sightings.are_known:
            vars(fetcher)["fetch"] = self._fetches[fetcher] = self._watched(ref(fetcher), sightings)

    def ends(self) -> None:
        """Takes out what is in the place of a `fetch`."""
        for fetcher in list(self._fetches):
            self._take_out(fetcher)

    def _take_out(self, fetcher: Any) -> None:
        """The fetcher fetches as before, unless another library has put something of its own there since:
        that holds ours, which does no more."""
        ours = self._fetches.pop(fetcher, None)
        if ours is not None and vars(fetcher).get("fetch") is ours:
            del vars(fetcher)["fetch"]

    def _watched(self, of: Callable[[], Any], sightings: Sightings) -> Callable[[Any], Any]:
        """Returns what to call instead of `fetch`; it keeps no fetcher alive."""
        recorder = self._recorder

        def fetch(indices: Any) -> Any:
            fetcher = of()
            looks, collate_fn = None, fetcher.collate_fn
            if get_ident() == recorder.thread and fetcher in self._fetches:
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
                    self._take_out(fetcher)

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
        if self._facts is not self._recorder.facts:
            return  # in a forked child, of the loaders of its parent
        self._recorder.facts["own_sightings"] = [
            [number, index, sum_]
            for number, sightings in self._loaders.items()
            for index, sums in sightings.sums.items()
            for sum_ in sums
        ]


class Sightings:
    """The watched samples of one loader, or of those that one line makes one after the other.

    Attributes:
        sums: Checksums of each, as often as it has come, by its index.
        places: Where in the batch that is fetched those of them are that are wanted, with their indices.
    """

    def __init__(self) -> None:
        self.sums: dict[int, list[int]] = {}
        self.places: list[tuple[int, int]] = []
        self._wanted: set[int] = set()
        self._first = True
        self._begins = False  # no batch of the epoch has been asked for
        self._given_up = False
        self._dataset: ref[Any] | int | None = None
        self._num_datasets = 0
        self._anew: set[int] = set()  # not yet seen of this dataset, but of one before
        self._states: dict[str, int] = {}

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

    def epoch_begins(self, dataset: Any) -> None:
        """Another epoch begins: the samples may come again. Those of another dataset, which the line may
        have made anew, are the same ones if they come out the same, and else others."""
        if not is_same(self._dataset, dataset):
            self._dataset = identity(dataset)
            self._num_datasets += 1
            self._anew = set(self.sums)
            self._given_up = self._given_up or self._num_datasets > MAX_DATASETS
        self._begins = True
        self._wanted = set(self.sums)

    def asked(self, indices: Any) -> None:
        """A batch is asked for."""
        self.places = []
        begins, self._begins = self._begins, False
        if isinstance(indices, list) and indices and indices[0] is None:  # of a stream: what comes next
            if not begins:
                self._wanted.clear()
                return
            indices = list(range(len(indices)))
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
        if self.places:
            self._states = random_states()

    def fetched(self, samples: Any) -> None:
        """Its samples are there, and will be made a batch of."""
        places, self.places = self.places, []
        if moved(self._states, random_states()):  # an augmentation that seldom strikes has not struck yet
            self._given_up = True
            self.sums.clear()
            return
        for place, index in places:
            # What makes whole batches need not return one sample for each index.
            sum_ = checksum(samples[place]) if isinstance(samples, list) and place < len(samples) else None
            if sum_ is None:
                self._given_up = True
                return
            self._wanted.discard(index)
            self._seen(int(index), sum_)

    def _seen(self, index: int, sum_: int) -> None:
        sums = self.sums.setdefault(index, [])
        if index in self._anew:
            self._anew.discard(index)
            if sum_ not in sums:
                sums.clear()
        sums.append(sum_)
