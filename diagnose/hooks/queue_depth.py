"""How many finished batches were waiting when the loop asked for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced, spanned


class QueueDepthHook(Hook):
    """Counts the ready batches of a multi-process loader at each `next`: an empty queue means slow workers.

    Batches that arrived out of order are ready too. Where the platform cannot tell a queue's size (macOS),
    nothing is counted.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

        counters = recorder.feed.counters

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            batches = args[0]
            try:
                ready = batches._data_queue.qsize()
            except NotImplementedError:
                return -1
            # A task's entry grows from (worker,) to (worker, data) when its batch came before its turn.
            ready += sum(len(task) == 2 for task in batches._task_info.values())
            counters["asked"] += 1
            counters["ready"] += ready
            return -1

        with replaced(
            _MultiProcessingDataLoaderIter,
            "_next_data",
            lambda original: spanned(original, recorder, before),
        ):
            yield
