"""Time in collectives that the script calls itself, and in waiting for those that it lets run beside."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

from diagnose.core.ledger import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER
from diagnose.hooks._frames import USER, owner
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import THEN, Hook, around, replaced, replaced_in, spanned

INSIDE = FORWARD, BACKWARD, OPTIMIZER
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


class Sums:
    """What was added up over the ranks so far that may be gradients.

    Attributes:
        works: Sums under way.
        waited_ns: How long they took.
    """

    def __init__(self) -> None:
        self.works: weakref.WeakSet[Any] = weakref.WeakSet()
        self.waited_ns = 0
        self._elements = self._passes = self._last_pass = 0

    def add(self, elements: int, took_ns: int, backward_pass: int) -> None:
        """Adds one.

        Args:
            elements: How many numbers it adds up.
            took_ns: How long the call took.
            backward_pass: The pass that it came in or after.
        """
        self.waited_ns += took_ns
        self._elements += elements
        if self._last_pass != backward_pass:
            self._last_pass = backward_pass
            self._passes += 1

    def figures(self) -> dict[str, int]:
        """Returns all of it."""
        return {"elements": self._elements, "passes": self._passes, "waited_ns": self.waited_ns}


class CollectivesHook(Hook):
    """Charges the collectives of `torch.distributed` that Python calls to `communication`, and `Work.wait`.

    With NCCL a wait only makes the stream wait, and takes the host no time.

    What DDP launches from C++ is not seen here: see `ddp_waits`. What a rank waits for one other, as the
    stages of a pipeline do, is no collective, and what model and optimizers call is none of the loop's;
    `facts` tells how long both were, and how long of it a model waited for all ranks. So it does of sums
    between a backward pass and the optimizer's step, and how much they add up: as much as the model has are
    its gradients, which such a loop averages itself.

    A loop may do so in a hook of each parameter, while the backward pass goes on, or in an optimizer's
    step. That is told apart, as a part of what model and optimizers call: whether it was gradients is seen
    only by how much it was in all.
    """

    requires = "torch.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch import Tensor, distributed
        from torch._C import _current_autograd_node as node_under_way

        if not distributed.is_available():
            yield
            return
        from torch.distributed import distributed_c10d

        exchanges: weakref.WeakSet[Any] = weakref.WeakSet()  # works under way
        between, inside = Sums(), Sums()
        told = {"averaging": between, "averaging_inside": inside}
        begun_ns = waited_ns = among_all_ns = 0
        is_among_all = False

        def is_apart(argument: Any) -> bool:
            """Whether a call that is given this may be one of some ranks only."""
            if isinstance(argument, distributed_c10d.ProcessGroup):
                return argument is not distributed.group.WORLD
            return isinstance(argument, distributed_c10d.Work)

        def before(args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2) -> int:
            nonlocal is_among_all
            if recorder.current in INSIDE:
                caller = sys._getframe(depth).f_globals.get("__name__", "")
                if caller.partition(".")[0] not in TRAINERS:
                    in_model = recorder.current == FORWARD
                    slot = before_exchange(args, kwargs)
                    if slot >= 0 and in_model:
                        is_among_all = not any(map(is_apart, (*args, *kwargs.values())))
                    return slot
            return -1 if recorder.current == COMMUNICATION else COMMUNICATION

        def before_exchange(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal begun_ns, is_among_all
            if recorder.current == COMMUNICATION:
                return -1
            begun_ns, is_among_all = recorder.clock(), False
            return COMMUNICATION + THEN

        def before_wait(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            if args[0] in exchanges or args[0] in between.works:
                return before_exchange(args, kwargs)
            return before(args, kwargs, 3)

        def waited(args: tuple[Any, ...], result: Any) -> None:
            nonlocal among_all_ns, waited_ns
            took_ns = recorder.clock() - begun_ns
            waited_ns += took_ns
            among_all_ns += took_ns if is_among_all else 0
            if recorder.current in INSIDE and isinstance(result, distributed_c10d.Work):
                exchanges.add(result)  # wherever it is waited for
            if "exchanges" not in recorder.facts:
                tell()

        def waited_for(args: tuple[Any, ...], result: Any) -> None:
            took_ns = recorder.clock() - begun_ns
            if args[0] in between.works:
                between.waited_ns += took_ns
                return
            if args[0] in inside.works:
                inside.waited_ns += took_ns
            waited(args, result)

        def begun(args: tuple[Any, ...], work: Any) -> None:
            recorder.guarded(begins, work)

        def begins(work: Any) -> None:
            if "exchanges" not in recorder.facts:
                tell()
            if work is not None:
                exchanges.add(work)

        def tell() -> None:
            recorder.facts["exchanges"] = {"waited_ns": waited_ns, "among_all_ns": among_all_ns}

        def tell_sums(name: str) -> None:
            recorder.facts[name] = {**told[name].figures(), "rounds": recorder.rounds}

        def tell_more() -> None:
            if "exchanges" in recorder.facts:
                tell()
            for name in told:
                if name in recorder.facts:
                    tell_sums(name)

        def may_be_of_gradients(is_inside: bool, caller: FrameType) -> bool:
            """Whether what adds up may do so to gradients that no optimizer has used: the loop, or what the
            script has torch call when a parameter has its gradient or an optimizer steps."""
            if recorder.backward_passes == recorder.passes_stepped:
                return False
            if not is_inside:
                return True
            current = recorder.current
            if current not in (BACKWARD, OPTIMIZER) or owner(caller.f_code) != USER:
                return False
            # Of all nodes of a graph, one that leaves a gradient in a parameter has it by that name.
            return current == OPTIMIZER or hasattr(node_under_way(), "variable")

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, before, waited)

        def wrap_exchange(original: Any) -> Any:
            return spanned(original, recorder, before_exchange, waited)

        def wrap_wait(original: Any) -> Any:
            return spanned(original, recorder, before_wait, waited_for)

        def wrap_sum(place: int, name: str, original: Any) -> Any:
            averaged = 0  # elements that the call under way averages
            is_inside = False

            def before_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
                nonlocal averaged, begun_ns, is_inside
                slot = before(args, kwargs, 3)
                if slot < 0:
                    return slot
                averaged, is_inside = 0, slot != COMMUNICATION
                if may_be_of_gradients(is_inside, sys._getframe(2)):
                    summed = args[place] if len(args) > place else kwargs.get(name)
                    if isinstance(summed, Tensor) and summed.is_floating_point():
                        averaged = summed.numel()
                if averaged > 1:  # a single number is a loss for the log
                    begun_ns = recorder.clock()
                    return COMMUNICATION + THEN
                return slot

            def ended(args: tuple[Any, ...], result: Any) -> None:
                took_ns = recorder.clock() - begun_ns
                if is_inside:
                    waited(args, result)
                if averaged <= 1:
                    return
                kind = "averaging_inside" if is_inside else "averaging"
                told[kind].add(averaged, took_ns, recorder.backward_passes)
                if result is not None:
                    told[kind].works.add(result)
                if kind not in recorder.facts:
                    tell_sums(kind)

            return spanned(original, recorder, before_sum, ended)

        def wrap_maker(original: Any) -> Any:
            return around(original, after=begun)

        wraps: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(COLLECTIVES, wrap),
            **{name: partial(wrap_sum, *summed) for name, summed in SUMS.items()},
            **dict.fromkeys(EXCHANGES, wrap_exchange),
        }
        with ExitStack() as stack:
            for name, wrapper in wraps.items():
                owners = [one for one in (distributed_c10d, distributed) if hasattr(one, name)]
                stack.enter_context(replaced_in(owners, name, wrapper))
            for name in MADE_BY:
                stack.enter_context(replaced(distributed_c10d.ProcessGroup, name, wrap_maker))
            stack.enter_context(replaced(distributed_c10d.Work, "wait", wrap_wait))
            stack.enter_context(added(recorder.looks.flushed, tell_more))
            yield
