"""Time in collectives that the script calls itself, and in waiting for those that it lets run beside."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import THEN, Hook, hidden, replaced, replaced_in, spanned, unseen

COMMUNICATION = SLOT_OF["communication"]
INSIDE = tuple(SLOT_OF[phase] for phase in ("forward", "backward", "optimizer"))
"""A model's or an optimizer's own collectives, as of tensor parallelism or `ZeroRedundancyOptimizer`."""

TRAINERS = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages that run a loop's own code, and what it logs, inside of the model's forward."""

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
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)

EXCHANGES = ("recv", "send")
"""What waits for one other rank. It is charged alike, and its time told apart."""

SUMS = {"all_reduce": (0, "tensor"), "reduce": (0, "tensor"), "reduce_scatter_tensor": (1, "input")}
"""What a loop averages its gradients with, and which argument holds them."""

MADE_BY = ("recv", "recv_anysource", "send")
"""Methods of a process group that begin an exchange. `isend` and `irecv`, which call them, are not wrapped:
`P2POp` refuses any other function."""


class CollectivesHook(Hook):
    """Charges the collectives of `torch.distributed` that Python calls to `communication`, and `Work.wait`.

    With NCCL a wait only makes the stream wait, and takes the host no time.

    What DDP launches from C++ is not seen here: see `ddp_waits`. What a rank waits for one other, as the
    stages of a pipeline do, is no collective, and what model and optimizers call is none of the loop's;
    `facts` tells how long both were. So it does of sums between a backward pass and the optimizer's step,
    and how much they add up: as much as the model has are its gradients, which such a loop averages itself.
    """

    requires = "torch.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch import Tensor, distributed

        if not distributed.is_available():
            yield
            return
        from torch.distributed import distributed_c10d

        exchanges: weakref.WeakSet[Any] = weakref.WeakSet()  # works under way
        averages: weakref.WeakSet[Any] = weakref.WeakSet()
        begun_ns = waited_ns = averaged_ns = num_elements = num_passes = last_pass = 0

        def before(args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2) -> int:
            if recorder.current in INSIDE:
                caller = sys._getframe(depth).f_globals.get("__name__", "")
                if caller.partition(".")[0] not in TRAINERS:
                    return before_exchange(args, kwargs)
            return -1 if recorder.current == COMMUNICATION else COMMUNICATION

        def before_exchange(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal begun_ns
            if recorder.current == COMMUNICATION:
                return -1
            begun_ns = recorder.clock()
            return COMMUNICATION + THEN

        def before_wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            if args[0] in exchanges or args[0] in averages:
                return before_exchange(args, kwargs)
            return before(args, kwargs, 3)

        def waited(args: tuple[Any, ...], result: Any) -> None:
            nonlocal waited_ns
            waited_ns += recorder.clock() - begun_ns
            if "exchanges" not in recorder.facts:
                tell()

        def waited_for(args: tuple[Any, ...], result: Any) -> None:
            nonlocal averaged_ns
            if args[0] in averages:
                averaged_ns += recorder.clock() - begun_ns
            else:
                waited(args, result)

        def begins(work: Any) -> None:
            if "exchanges" not in recorder.facts:
                tell()
            if work is not None:
                exchanges.add(work)

        def tell() -> None:
            recorder.facts["exchanges"] = {"waited_ns": waited_ns}

        def tell_averages() -> None:
            recorder.facts["averaging"] = {
                "elements": num_elements,
                "passes": num_passes,
                "waited_ns": averaged_ns,
            }

        def tell_more() -> None:
            if "exchanges" in recorder.facts:
                tell()
            if "averaging" in recorder.facts:
                tell_averages()

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, before, waited)

        def wrap_exchange(original: Any) -> Any:
            return spanned(original, recorder, before_exchange, waited)

        def wrap_wait(original: Any) -> Any:
            return spanned(original, recorder, before_wait, waited_for)

        def wrap_sum(place: int, name: str, original: Any) -> Any:
            averaged = 0  # elements that the call under way averages

            def before_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
                nonlocal averaged, begun_ns
                slot = before(args, kwargs, 3)
                if slot < 0:
                    return slot
                averaged = 0
                if slot == COMMUNICATION and recorder.backward_passes != recorder.passes_stepped:
                    summed = args[place] if len(args) > place else kwargs.get(name)
                    if isinstance(summed, Tensor) and summed.is_floating_point():
                        averaged = summed.numel()
                if averaged > 1:  # a single number is a loss for the log
                    begun_ns = recorder.clock()
                    return COMMUNICATION + THEN
                return slot

            def ended(args: tuple[Any, ...], result: Any) -> None:
                nonlocal averaged_ns, last_pass, num_elements, num_passes
                if averaged <= 1:
                    waited(args, result)
                    return
                averaged_ns += recorder.clock() - begun_ns
                num_elements += averaged
                if last_pass != recorder.backward_passes:
                    last_pass = recorder.backward_passes
                    num_passes += 1
                if result is not None:
                    averages.add(result)
                if "averaging" not in recorder.facts:
                    tell_averages()

            return spanned(original, recorder, before_sum, ended)

        def wrap_maker(original: Any) -> Any:
            def make(*args: Any, **kwargs: Any) -> Any:
                try:
                    work = original(*args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise
                recorder.guarded(begins, work)
                return work

            return hidden(make)

        wraps: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(COLLECTIVES, wrap),
            **{name: partial(wrap_sum, *summed) for name, summed in SUMS.items()},
            **dict.fromkeys(EXCHANGES, wrap_exchange),
        }
        with ExitStack() as stack:
            for name, wrapper in wraps.items():
                owners = [owner for owner in (distributed_c10d, distributed) if hasattr(owner, name)]
                stack.enter_context(replaced_in(owners, name, wrapper))
            for name in MADE_BY:
                stack.enter_context(replaced(distributed_c10d.ProcessGroup, name, wrap_maker))
            stack.enter_context(replaced(distributed_c10d.Work, "wait", wrap_wait))
            stack.enter_context(added(recorder.looks.flushed, tell_more))
            yield
