"""What a step waits for parameters to be gathered and gradients to be scattered by `fully_shard`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import COMMUNICATION
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced, spanned, timed


class FsdpWaitsHook(Hook):
    """Charges the waits of FSDP2's parameter groups, which are made in Python, to `communication`.

    On CUDA devices the host only launches there, and the gradients' half in a thread of autograd's, which
    is not measured: what is told of that half is the time of the launches, and it is said whether the
    groups are on CPUs.
    """

    requires = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        gathered_ns = regathered_ns = scattered_ns = 0
        in_backward = False  # where the group that is gathering is
        known: weakref.WeakSet[Any] = weakref.WeakSet()

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            return -1 if recorder.current == COMMUNICATION else COMMUNICATION

        def took(time_ns: int) -> None:
            nonlocal gathered_ns, regathered_ns
            gathered_ns += time_ns
            if in_backward:
                regathered_ns += time_ns

        def sent(time_ns: int) -> None:
            nonlocal scattered_ns
            scattered_ns += time_ns

        def meet(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal in_backward
            in_backward = args[0]._training_state is TrainingState.PRE_BACKWARD
            if args[0] not in known:
                known.add(args[0])
                recorder.facts["fsdp"] = describe(list(known))
            return before(args, kwargs)

        def gathers(original: Any) -> Any:
            return timed(spanned(original, recorder, meet), recorder, took)

        def scatters(original: Any) -> Any:
            return timed(spanned(original, recorder, before), recorder, sent)

        def tell() -> None:
            if "fsdp" in recorder.facts:
                recorder.facts["fsdp"].update(
                    gathered_ns=gathered_ns, regathered_ns=regathered_ns, scattered_ns=scattered_ns
                )

        with (
            replaced(groups.FSDPParamGroup, "unshard", gathers),
            replaced(groups.FSDPParamGroup, "wait_for_unshard", gathers),
            replaced(groups.FSDPParamGroup, "finalize_backward", scatters),
            replaced(groups, "foreach_reduce", scatters),
            added(recorder.looks.flushed, tell),
        ):
            yield


def describe(groups: list[Any]) -> dict[str, Any]:
    """Returns the facts of `core.parallel.Fsdp` that the groups themselves know."""
    params = [param for group in groups for param in group.fsdp_params]
    sizes = [param._orig_size.numel() * param.sharded_param.element_size() for param in params]
    return {
        "world_size": max(group._all_gather_process_group.size() for group in groups),
        "on_cpu": all(group.device.type == "cpu" for group in groups),
        "reshards": any(group._reshard_after_forward for group in groups),
        "unsharded_bytes": sum(sizes),
    }
