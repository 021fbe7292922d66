"""Time in saving sharded state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced_in
from diagnose.hooks.checkpoint import wrapped


class CheckpointDistributedHook(Hook):
    """Charges `save` and `async_save` of `torch.distributed.checkpoint` to `checkpoint`."""

    requires = "torch.distributed.checkpoint"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint import state_dict_saver

        with ExitStack() as stack:
            for name in ("save", "async_save"):
                owners = (state_dict_saver, checkpoint)
                stack.enter_context(replaced_in(owners, name, wrapped(recorder)))
            yield
