"""Which rank of its job this process is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, around, replaced_in


class ProcessGroupHook(Hook):
    """Remembers rank and world size when the script makes its process group.

    The environment tells them only where torchrun set it: the processes of `torch.multiprocessing.spawn`
    get their rank as an argument. When the records are written the group may be gone.
    """

    requires = "torch.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch import distributed

        if not distributed.is_available():
            yield
            return

        def look() -> None:
            if distributed.is_initialized():
                recorder.facts["place"] = [distributed.get_rank(), distributed.get_world_size()]

        def joined(args: tuple[Any, ...], result: None) -> None:
            recorder.guarded(look)

        owners = (distributed.distributed_c10d, distributed)
        with replaced_in(owners, "init_process_group", lambda original: around(original, after=joined)):
            recorder.guarded(look)
            yield
