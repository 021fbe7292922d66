"""Time in saving sharded state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced, spanned
from diagnose.hooks.checkpoint import saving


class CheckpointDistributedHook(Hook):
    """Charges `save` and `async_save` of `torch.distributed.checkpoint` to `checkpoint`."""

    requires = "torch.distributed.checkpoint"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch.distributed import checkpoint

        with (
            replaced(checkpoint, "save", lambda original: spanned(original, recorder, saving(recorder))),
            replaced(
                checkpoint, "async_save", lambda original: spanned(original, recorder, saving(recorder))
            ),
        ):
            yield
