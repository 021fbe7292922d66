"""Time in saving sharded state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced_in
from diagnose.hooks.checkpoint import wrapped


class CheckpointDistributedHook(Hook):
    """Charges `save` and `async_save` of `torch.distributed.checkpoint` to `checkpoint`."""

    requires = "torch.distributed.checkpoint"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint import state_dict_saver

        owners, wrap = (state_dict_saver, checkpoint), wrapped(recorder)
        with replaced_in(owners, "save", wrap), replaced_in(owners, "async_save", wrap):
            yield
