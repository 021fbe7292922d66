"""What each loader that feeds training is set to, where it was made, and what its epochs cost to begin."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from diagnose.core.ledger import DATA_WAIT, EVALUATION
from diagnose.core.workers import NOT_TRAINING
from diagnose.hooks._drawing import draws_with_first_batch, random_state
from diagnose.hooks._frames import INTERNAL, LIBRARY, owner, place_of, resolve, user_frame
from diagnose.hooks._identity import identity, is_same
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._worker_reports import inbox
from diagnose.hooks.base import THEN, Hook, around, replaced, spanned

MAX_LOADERS = 20
"""A script that makes ever new loaders on ever new lines is generated; the first ones tell enough."""

MAX_STARTS = 256
"""Epochs whose beginning is kept. The facts are written twice a second, so the list must end somewhere."""

MAX_TENSORS = 16
"""A longer list in a dataset holds its samples."""

MAX_DEPTH = 3
"""A part of a part of a part of a dataset is still looked at."""


class LoaderFactsHook(Hook):
    """Writes the facts of each `DataLoader` that the loop iterates over for training, once per epoch.

    Charges `iter(loader)` to `data_wait`: the loop is blocked there until the workers are started. An
    iteration that begins without gradients or in evaluation mode is evaluation, and so are its workers. Not
    that of a loader that has fed training once the evaluation has had its calls: trainers switch back only
    when they have the batch. Nor that of one whose training batches are asked for without gradients: that
    is known of it only when some have been. Of one that starts workers to evaluate, the facts are written
    for each start.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch import is_grad_enabled
        from torch.utils.data import DataLoader

        facts = LoaderFacts(recorder)
        feed, on_iterator = recorder.feed, recorder.looks.on_iterator
        begun_freely: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
        begun_ns = evaluation_ns = 0

        def made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.guarded(facts.made, args[0], args[1] if len(args) > 1 else kwargs.get("dataset"))

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal begun_ns, evaluation_ns
            if recorder.current == DATA_WAIT:
                return -1  # a loader that makes its batches out of another loader
            trained = recorder.evaluated and facts.has_fed(args[0])
            free = not is_grad_enabled() and facts.number(args[0]) not in feed.freely
            if free or (recorder.evaluating and not trained):
                recorder.evaluation_begins()
                begun_ns, evaluation_ns = 0, recorder.clock()
                return EVALUATION + THEN
            begun_ns = recorder.clock()
            return DATA_WAIT + THEN

        def after(args: tuple[Any, ...], batches: Any) -> None:
            index = NOT_TRAINING
            if begun_ns:
                index = facts.begins(args[0], recorder.clock() - begun_ns)
                feed.iterators[batches] = index
                if draws_with_first_batch(args[0]):
                    feed.undrawn[batches] = random_state()
                for begins in list(on_iterator):
                    recorder.guarded(begins, args[0], batches)
            else:
                trained = feed.iterators.pop(batches, None)  # persistent workers keep the iterator
                if trained is None and batches not in begun_freely and getattr(batches, "_workers", None):
                    feed.starting[batches] = facts.starts(args[0], recorder.clock() - evaluation_ns)
                begun_freely[batches] = ref(args[0])
            for process in getattr(batches, "_workers", ()):
                inbox.loaders[process.pid] = index

        def begins_late(batches: Any) -> int | None:
            of = begun_freely.pop(batches, None)
            loader = of() if of is not None else None
            if loader is None:
                return None
            index = facts.begins(loader, 0)
            feed.iterators[batches] = index
            for process in getattr(batches, "_workers", ()):
                inbox.loaders[process.pid] = index
            return index

        feed.begins_late = begins_late
        with (
            replaced(DataLoader, "__init__", lambda original: around(original, made)),
            replaced(DataLoader, "__iter__", lambda original: spanned(original, recorder, before, after)),
        ):
            yield


@dataclass(slots=True)
class Made:
    """A loader that a line of the script has made, and what packages have made of it.

    Attributes:
        site: File and line.
        has_fed: Whether it has fed training.
    """

    site: tuple[str, int]
    has_fed: bool = False


class LoaderFacts:
    """Gathers facts of loaders into `recorder.facts["loaders"]`, the first used first.

    Args:
        recorder: Whose `facts` are written. Each time the list is a new one, since the flusher's thread may
            be reading the old.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: WeakKeyDictionary[Any, Made] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_others: Counter[tuple[str, int]] = Counter()
        self._datasets: dict[tuple[str, int], ref[Any] | int] = {}
        self._begun_at = -1
        self._evaluating: WeakSet[Any] = WeakSet()

    def made(self, loader: Any, dataset: Any) -> None:
        """A loader is being made: remembers the user's line.

        What a package makes of a loader of the user's, as `accelerator.prepare(loader)` does, is that one.
        """
        frame = user_frame(sys._getframe(1))
        if frame is None:
            return
        known = self._made.items() if _in_package(sys._getframe(1)) else ()
        made = next((made for each, made in known if getattr(each, "dataset", None) is dataset), None)
        if made is None:
            made = Made(resolve(*frame)[:2])
            self._num_others[made.site] += 1
            loaders = self._recorder.facts.get("loaders", ())
            if any(_site(fact) == made.site for fact in loaders):
                more = {"num_others": self._num_others[made.site]}
                self._recorder.facts["loaders"] = [
                    {**fact, **more} if _site(fact) == made.site else fact for fact in loaders
                ]
        self._made[loader] = made

    def has_fed(self, loader: Any) -> bool:
        """Whether the loop has iterated over a loader for training before."""
        return loader in self._seen

    def number(self, loader: Any) -> int | None:
        """Returns the index of a loader among the facts; `None` where it has fed no training."""
        return self._seen.get(loader)

    def begins(self, loader: Any, took_ns: int) -> int:
        """The loop has begun to iterate over a loader.

        Args:
            loader: The loader.
            took_ns: What `iter(loader)` took.

        Returns:
            The loader's index among the facts.
        """
        recorder = self._recorder
        loaders = [dict(known) for known in recorder.facts.get("loaders", ())]
        index = self._index(loader, loaders)
        steps = recorder.steps
        for known in loaders:  # several that begin in the same step feed it together
            if known["begun_at"] == self._begun_at >= 0:
                known["steps"] += steps - self._begun_at
        fact = loaders[index]
        fact["epochs"] += 1
        fact["total_construct_ns"] += took_ns
        # The wait for the epoch's first batch may belong to the next step: a loop left by `break` asks for
        # it before the step ends.
        first = steps + bool(recorder.finder.stepped)
        if len(fact["starts"]) < MAX_STARTS:
            fact["starts"] = [*fact["starts"], [steps, first, took_ns]]
        elif fact["starts_end"] is None:
            fact["starts_end"] = steps
        fact["begun_at"] = self._begun_at = steps
        recorder.facts["loaders"] = loaders
        if len(loaders) > 1:  # batches asked of each from now on, and nanoseconds waited for them
            recorder.facts.setdefault("waits", [[0, 0] for _ in range(MAX_LOADERS)])
        return index

    def starts(self, loader: Any, took_ns: int) -> Callable[[int], None]:
        """A loader has started workers for an evaluation.

        Args:
            loader: The loader.
            took_ns: What `iter(loader)` took.

        Returns:
            What takes the nanoseconds that were then waited for the first batch.
        """
        recorder, made = self._recorder, self._made.get(loader)
        site = made.site if made is not None else ("", 0)
        is_new = loader not in self._evaluating
        self._evaluating.add(loader)
        start = [recorder.steps, recorder.steps, took_ns]

        def started(waited_ns: int) -> None:
            known = [dict(fact) for fact in recorder.facts.get("evaluating", ())]
            fact = next((fact for fact in known if _site(fact) == site), None)
            if fact is None and len(known) < MAX_LOADERS:
                known.append(fact := {**described(loader, *site), "num_objects": 0})
            if fact is None or len(fact["starts"]) >= MAX_STARTS:
                return
            fact["epochs"] += 1
            fact["num_objects"] += is_new
            fact["starts"] = [*fact["starts"], [*start[:2], took_ns + waited_ns]]
            if len(fact["starts"]) == MAX_STARTS:
                fact["starts_end"] = recorder.steps + 1
            recorder.facts["evaluating"] = known

        return started

    def _index(self, loader: Any, loaders: list[dict[str, Any]]) -> int:
        """Returns where the facts of a loader stand; puts them there if need be."""
        index = self._seen.get(loader)
        if index is not None and index < len(loaders):
            return index
        made = self._made.get(loader)
        site = made.site if made is not None else ("", 0)
        same = [i for i, known in enumerate(loaders) if site[0] and _site(known) == site]
        alike = True
        if same:
            index = same[0]  # made anew each epoch, on the same line
            loaders[index]["num_objects"] += 1
            alike = self._is_alike(loader, loaders[index])
        elif len(loaders) < MAX_LOADERS:
            index = len(loaders)
            loaders.append(described(loader, *site))
            self._datasets[site] = identity(getattr(loader, "dataset", None))
        else:
            index = 0
        self._seen[loader] = index
        if made is not None:
            self._num_others[site] += (not alike) - (not made.has_fed)
            made.has_fed = True
            if _site(loaders[index]) == site:
                loaders[index]["num_others"] = self._num_others[site]
        return index

    def _is_alike(self, loader: Any, fact: Mapping[str, Any]) -> bool:
        """Whether a loader has the dataset and the number of workers of the first one of its line."""
        known = self._datasets.get(_site(fact))
        alike = is_same(known, getattr(loader, "dataset", None))
        return alike and getattr(loader, "num_workers", 0) == fact["num_workers"]


def _site(fact: Mapping[str, Any]) -> tuple[str, int]:
    return fact["file"], fact["line"]


def described(loader: Any, file: str, line: int) -> dict[str, Any]:
    """Returns the facts of `core.program.Loader`; a subclass of the user's may lack any attribute."""
    from torch.utils.data import IterableDataset

    batch_size = getattr(loader, "batch_size", None)
    if batch_size is None:
        batch_size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    collate_fn = getattr(loader, "collate_fn", None)
    collate_file, collate_line = place_of(collate_fn)
    sampler = type(getattr(loader, "sampler", None)).__name__
    prefetch_factor = getattr(loader, "prefetch_factor", None)
    return {
        "num_workers": int(getattr(loader, "num_workers", 0)),
        "batch_size": batch_size if isinstance(batch_size, int) else None,
        "pin_memory": bool(getattr(loader, "pin_memory", False)),
        "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "prefetch_factor": prefetch_factor if isinstance(prefetch_factor, int) else None,
        "dataset": type(getattr(loader, "dataset", None)).__name__,
        "iterable": isinstance(getattr(loader, "dataset", None), IterableDataset),
        "on_device": _is_on_device(getattr(loader, "dataset", None)),
        "dataset_length": _length(loader, sampler),
        "collate": str(getattr(collate_fn, "__qualname__", type(collate_fn).__name__)),
        "collate_file": collate_file,
        "collate_line": collate_line,
        "sampler": sampler,
        "file": file,
        "line": line,
        "epochs": 0,
        "num_objects": 1,
        "num_others": None,
        "steps": 0,
        "begun_at": -1,
        "total_construct_ns": 0,
        "starts": [],
        "starts_end": None,
    }


def _in_package(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is neither ours nor torch's is an installed package's."""
    while frame is not None and owner(frame.f_code) == INTERNAL:
        frame = frame.f_back
    return frame is not None and owner(frame.f_code) == LIBRARY


def _is_on_device(dataset: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a dataset, or one that it is a part of, holds a tensor on a device, or a few of them."""
    from torch import Tensor
    from torch.utils.data import Dataset

    for value in list(getattr(dataset, "__dict__", {}).values()):
        several = isinstance(value, (tuple, list)) and len(value) <= MAX_TENSORS
        for each in value if several else (value,):
            if isinstance(each, Tensor) and each.device.type != "cpu":
                return True
            if depth and isinstance(each, Dataset) and _is_on_device(each, depth - 1):
                return True
    return False


def _length(loader: Any, sampler: str) -> int | None:
    # Only where torch's own sampler has asked the dataset for its length before: it may be costly, or have
    # none. Beside a batch sampler of the script's there is a sampler, too, which nobody asks.
    batch_sampler = getattr(loader, "batch_sampler", None)
    asked = batch_sampler is None or getattr(batch_sampler, "sampler", None) is loader.sampler
    if asked and sampler in ("SequentialSampler", "RandomSampler"):
        length = len(loader.dataset)
        return length if isinstance(length, int) else None
    return None
