"""What the training thread takes to draw which samples a loader's workers are to fetch, or it itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from diagnose.core.ledger import DATA_WAIT
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, hidden, replaced, timed, unseen


class DrawnOrderHook(Hook):
    """Times the sampler of a loader, for training: it runs on the training thread, within `iter(loader)`
    and `next(loader)`, whoever fetches the samples.

    Where there are workers, that includes putting a batch's indices into the worker's queue, some 20 us.
    What an epoch's beginning draws, the first batches that the workers are given included, is kept apart
    from what comes with each later batch.

    Without workers the training thread fetches what it has drawn: what drawing takes is told apart from
    that, but for the first batch of each epoch.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

        counters = recorder.feed.counters
        beginning = False

        def drawn(elapsed_ns: int) -> None:
            if recorder.current == DATA_WAIT and get_ident() == recorder.thread:
                counters["draws"] += 1
                counters["drawn_first_ns" if beginning else "drawn_ns"] += elapsed_ns

        def drawn_alone(batches: Any, elapsed_ns: int) -> None:
            if batches._num_workers or not batches._num_yielded:
                return
            if recorder.current == DATA_WAIT and get_ident() == recorder.thread:
                counters["own_draws"] += 1
                counters["own_drawn_ns"] += elapsed_ns

        def makes(elapsed_ns: int) -> None:
            if recorder.current == DATA_WAIT and get_ident() == recorder.thread:
                counters["drawn_first_ns"] += elapsed_ns

        def wrap_reset(original: Any) -> Any:
            def reset(*args: Any, **kwargs: Any) -> Any:
                nonlocal beginning
                beginning = True
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
                finally:
                    beginning = False

            return hidden(functools.wraps(original)(reset))

        def wrap_index(original: Any) -> Any:
            clock = recorder.clock

            def next_index(batches: Any) -> Any:
                begun = clock()
                try:
                    index = original(batches)
                except BaseException as error:
                    unseen(error)
                    raise
                recorder.guarded(drawn_alone, batches, clock() - begun)
                return index

            return hidden(functools.wraps(original)(next_index))

        def wrap_making(original: Any) -> Any:  # a sampler whose `__iter__` is no generator draws here
            return timed(original, recorder, makes)

        with (
            replaced(_BaseDataLoaderIter, "__init__", wrap_making),
            replaced(_BaseDataLoaderIter, "_reset", wrap_making),
            replaced(_BaseDataLoaderIter, "_next_index", wrap_index),
            replaced(_MultiProcessingDataLoaderIter, "_reset", wrap_reset),
            replaced(
                _MultiProcessingDataLoaderIter,
                "_try_put_index",
                lambda original: timed(original, recorder, drawn),
            ),
        ):
            yield
