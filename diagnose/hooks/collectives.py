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
from diagnose.hooks._sums import Line, Sums
from diagnose.hooks.base import THEN, Hook, around, replaced, replaced_in, spanned

INSIDE = FORWARD, BACKWARD, OPTIMIZER
"""A model's or an optimizer's own collectives, as of tensor parallelism or `ZeroRedundancyOptimizer`."""

TRAINERS = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages that run a loop's own code, and what it logs, inside of the model's forward."""

# What ends in "single" is of torch 2.13.
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
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
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)

EXCHANGES = ("recv", "send")
"""What waits for one other rank. It is charged alike, and its time told apart."""

SUMS = {
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "all_gather_single": (1, "input_tensor"),
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "gather": (0, "tensor"),
    "reduce": (0, "tensor"),
    "reduce_scatter_single": (1, "input"),
    "reduce_scatter_tensor": (1, "input"),
}
"""What a loop averages its gradients with, and which argument holds them."""

HAND_ON = {"all_gather": 0, "all_gather_into_tensor": 0, "all_gather_single": 0, "broadcast": 1}
"""What a loop hands on with what one rank's optimizer has updated, and from how many ranks; 0 is all."""

MADE_BY = ("recv", "recv_anysource", "send")
"""Methods of a process group that begin an exchange. `isend` and `irecv`, which call them, are not wrapped:
`P2POp` refuses any other function."""


class CollectivesHook(Hook):
    """Charges the collectives of `torch.distributed` that Python calls to `communication`, and `Work.wait`.

    With NCCL a wait only makes the stream wait, and takes the host no time.

    What DDP launches from C++ is not seen here: see `ddp_waits`. What a rank waits for one other, as the
    stages of a pipeline do, is no collective, and what model and optimizers call is none of the loop's;
    `facts` tells how long both were, and how long of it a model waited for all ranks. So it does of sums
    between a backward pass and the optimizer's step, and how much they add up: as much as the model has are
    its gradients, which such a loop averages itself.

    What it gathers there to add up itself, and what it then hands on to the others, is told likewise; and
    apart what it hands on after the step, as where each rank's optimizer updates a part of the parameters.

    A loop may do so in a hook of each parameter, while the backward pass goes on, or in an optimizer's
    step. That is told apart, as a part of what model and optimizers call: whether it was gradients is seen
    only by how much it was in all.
    """

    requires = "torch.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch import Tensor, distributed
        from torch._C import _current_autograd_node as node_under_way

        if not distributed.is_available():
            yield
            return
        from torch.distributed import distributed_c10d

        exchanges: weakref.WeakSet[Any] = weakref.WeakSet()  # works under way
        between, inside, updates = Sums(), Sums(), Sums()
        told = {"averaging": between, "averaging_inside": inside, "handed_on": updates}
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
            if args[0] in exchanges or args[0] in between.works or args[0] in updates.works:
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
            for sums in told.values():
                if args[0] in sums.works:
                    sums.works[args[0]].waited_ns += took_ns
                    if sums is not inside:
                        return
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
            models = recorder.met.live_modules()
            trained = {id(p): p.numel() for model in models for p in model.parameters() if p.requires_grad}
            recorder.facts[name] = {
                **told[name].figures(),
                "rounds": recorder.rounds,
                "trained": sum(trained.values()),
                "trained_tensors": len(trained),
            }

        def tell_more() -> None:
            if "exchanges" in recorder.facts:
                tell()
            for name in told:
                if name in recorder.facts:
                    tell_sums(name)

        def kind_of(name: str, is_inside: bool, caller: FrameType) -> str:
            """What a call may be for, by its name in `told`: gradients that no optimizer has used, if the
            loop asks for it, or what the script has torch call when a parameter has its gradient or an
            optimizer steps. Or what an optimizer has updated. Empty where it is for neither."""
            if recorder.backward_passes == recorder.passes_stepped:
                hands_on = name in HAND_ON and not is_inside and recorder.backward_passes
                return "handed_on" if hands_on else ""
            if not is_inside:
                return "averaging"
            current = recorder.current
            if current not in (BACKWARD, OPTIMIZER) or owner(caller.f_code) != USER:
                return ""
            # Of all nodes of a graph, one that leaves a gradient in a parameter has it by that name.
            of_gradients = current == OPTIMIZER or hasattr(node_under_way(), "variable")
            return "averaging_inside" if of_gradients else ""

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, before, waited)

        def wrap_exchange(original: Any) -> Any:
            return spanned(original, recorder, before_exchange, waited)

        def wrap_wait(original: Any) -> Any:
            return spanned(original, recorder, before_wait, waited_for)

        def wrap_sum(name: str, original: Any) -> Any:
            place, argument = SUMS[name]
            kind, elements = "", 0  # of the call under way
            line: Line | None = None
            is_inside = False

            def before_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
                nonlocal begun_ns, elements, is_inside, kind, line
                slot = before(args, kwargs, 3)
                if slot < 0:
                    return slot
                line, is_inside = None, slot != COMMUNICATION
                caller = sys._getframe(2)
                kind = kind_of(name, is_inside, caller)
                tensor = (args[place] if len(args) > place else kwargs.get(argument)) if kind else None
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.numel() <= 1:
                    return slot  # a single number is a loss for the log
                elements = tensor.numel()
                if kind == "handed_on":
                    elements *= HAND_ON[name] or distributed.get_world_size()
                line = told[kind].line(caller, tensor, recorder.met.live_modules)
                begun_ns = recorder.clock()
                return COMMUNICATION + THEN

            def ended(args: tuple[Any, ...], result: Any) -> None:
                took_ns = recorder.clock() - begun_ns
                if is_inside:
                    waited(args, result)
                if line is None:
                    return
                summed = name != "broadcast" or kind == "handed_on"
                told[kind].add(line, elements, took_ns, recorder.backward_passes, summed=summed)
                if result is not None:
                    told[kind].works[result] = line
                if kind not in recorder.facts:
                    tell_sums(kind)

            return spanned(original, recorder, before_sum, ended)

        def wrap_maker(original: Any) -> Any:
            return around(original, after=begun)

        wraps: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(COLLECTIVES, wrap),
            **{name: partial(wrap_sum, name) for name in SUMS},
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
