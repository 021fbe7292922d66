"""Which rank of its job this process is."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, hidden, replaced_in, unseen


class ProcessGroupHook(Hook):
    """Remembers rank and world size when the script makes its process group.

    The environment tells them only where torchrun set it: the processes of `torch.multiprocessing.spawn`
    get their rank as an argument. When the records are written the group may be gone.
    """

    requires = "torch.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch import distributed

        if not distributed.is_available():
            yield
            return

        def joined() -> None:
            if distributed.is_initialized():
                recorder.facts["place"] = [distributed.get_rank(), distributed.get_world_size()]

        def wrap(original: Any) -> Any:
            def init(*args: Any, **kwargs: Any) -> Any:
                try:
                    result = original(*args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
                recorder.guarded(joined)
                return result

            return hidden(functools.wraps(original)(init))

        with ExitStack() as stack:
            owners = (distributed.distributed_c10d, distributed)
            stack.enter_context(replaced_in(owners, "init_process_group", wrap))
            recorder.guarded(joined)
            yield
