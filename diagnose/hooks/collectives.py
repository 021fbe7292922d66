"""Time in collectives that the script calls itself, and in waiting for those that it lets run beside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced, spanned

COMMUNICATION = SLOT_OF["communication"]

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


class CollectivesHook(Hook):
    """Charges the collectives of `torch.distributed` that Python calls to `communication`, and `Work.wait`.

    With NCCL a wait only makes the stream wait, and takes the host no time.

    What DDP launches from C++ during the backward pass is not seen here: see `ddp_waits`.
    """

    requires = "torch.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch import distributed

        if not distributed.is_available():
            yield
            return
        from torch.distributed import distributed_c10d

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            return -1 if recorder.current == COMMUNICATION else COMMUNICATION

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, before)

        with ExitStack() as stack:
            for owner in (distributed_c10d, distributed):
                for name in COLLECTIVES:
                    if hasattr(owner, name):
                        stack.enter_context(replaced(owner, name, wrap))
            stack.enter_context(replaced(distributed_c10d.Work, "wait", wrap))
            yield
