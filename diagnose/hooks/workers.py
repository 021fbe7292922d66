"""Fetch and collate apart, inside worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks import _worker
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._worker_reports import inbox
from diagnose.hooks.base import Hook, around, replaced


class WorkersHook(Hook):
    """Lets the worker processes of a `DataLoader` measure what they do, and opens the inbox for their
    reports.

    On the training thread the `dataloader` hook tells fetch and collate apart.
    """

    requires = "torch.utils.data.dataloader"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.utils.data._utils import worker as torch_worker
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.guarded(inbox.open)

        with (
            replaced(torch_worker, "_worker_loop", lambda loop: _worker.logged(loop, recorder)),
            replaced(_MultiProcessingDataLoaderIter, "__init__", lambda init: around(init, begin)),
        ):
            try:
                yield
            finally:
                inbox.close()
