"""Time the loop is blocked in `next(loader)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks._batch import batch_size
from diagnose.hooks._recorder import EVALUATED, EVERY_SITE_UNTIL, Recorder
from diagnose.hooks._worker import time_collate
from diagnose.hooks.base import THEN, Hook, replaced, spanned

DATA_WAIT = SLOT_OF["data_wait"]
EVALUATION = SLOT_OF["evaluation"]
TRAINING = DATA_WAIT + THEN

COLLATE_EVERY = 8
"""After the first batches, `collate_fn` is timed for one in this many."""


def nothing() -> None:
    """Stands for a reference to no iterator."""


class DataLoaderHook(Hook):
    """Charges `next()` of every `DataLoader` iterator to `data_wait`, or to `evaluation` if that is what it
    is for.

    Patches `_BaseDataLoaderIter.__next__`, which the single- and multi-process iterators share; torch has
    no public hook there. The iterator's type, length and attributes stay what they are.

    A batch is for evaluation when gradients are off, when the model was switched to evaluation mode, or
    when no training forward followed this iterator's batch before.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch import is_grad_enabled
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        for_evaluation: WeakSet[Any] = WeakSet()
        latest: Any = nothing
        loaded = (0, 0)
        calls = 0
        times = recorder.times
        waited_ns = -1

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal calls, latest
            batches = args[0]
            if recorder.current == DATA_WAIT:
                return -1
            if latest() is batches:
                if recorder.batch_use == EVALUATED:
                    for_evaluation.add(batches)
                    recorder.samples -= loaded[0]
                    recorder.tokens -= loaded[1]
            else:
                latest = ref(batches)
            if (
                not is_grad_enabled()
                or recorder.evaluating
                or (for_evaluation and batches in for_evaluation)
            ):
                latest = nothing
                recorder.evaluation_begins()
                return EVALUATION
            recorder.counters["batches"] = calls = calls + 1
            if calls < EVERY_SITE_UNTIL or not calls % COLLATE_EVERY:
                look(batches)
            recorder.batch_asked()
            return TRAINING

        def look(batches: Any) -> None:
            nonlocal waited_ns
            recorder.site("next")
            fetcher = getattr(batches, "_dataset_fetcher", None)  # none when workers fetch
            if fetcher is not None:
                waited_ns = times[DATA_WAIT]
                collate_fn = fetcher.collate_fn
                time_collate(fetcher, recorder, lambda: setattr(fetcher, "collate_fn", collate_fn))

        def after(args: tuple[Any, ...], batch: Any) -> None:
            nonlocal loaded, waited_ns
            if waited_ns >= 0:
                recorder.counters["collated_wait_ns"] += times[DATA_WAIT] - waited_ns
                waited_ns = -1
            loaded = batch_size(batch)
            recorder.samples += loaded[0]
            recorder.tokens += loaded[1]
            if loaded[0] and not recorder.stop_after:
                recorder.alert = False

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, before, after)

        with replaced(_BaseDataLoaderIter, "__next__", wrap):
            yield
