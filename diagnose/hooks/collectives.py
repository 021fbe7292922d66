"""Time in collectives that the script calls itself, and in waiting for those that it lets run beside."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
        from torch import distributed

        if not distributed.is_available():
            yield
            return
        from torch.distributed import distributed_c10d

        calls = _Calls(recorder)
        wraps: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(COLLECTIVES, calls.wrap),
            **{name: _SumCalls(name, calls, recorder).wrap for name in SUMS},
            **dict.fromkeys(EXCHANGES, calls.wrap_exchange),
        }
        with ExitStack() as stack:
            for name, wrapper in wraps.items():
                owners = [one for one in (distributed_c10d, distributed) if hasattr(one, name)]
                stack.enter_context(replaced_in(owners, name, wrapper))
            for name in MADE_BY:
                stack.enter_context(replaced(distributed_c10d.ProcessGroup, name, calls.wrap_maker))
            stack.enter_context(replaced(distributed_c10d.Work, "wait", calls.wrap_wait))
            stack.enter_context(added(recorder.looks.flushed, calls.tell_more))
            yield


class _Calls:
    """Every call of this process, and what of them is told in `facts`.

    Attributes:
        begun_ns: When the one under way began.
        sums: What is added up, by its name in `facts`.
    """

    def __init__(self, recorder: Recorder) -> None:
        from torch import distributed

        self.begun_ns = 0
        self.sums = {"averaging": Sums(), "averaging_inside": Sums(), "handed_on": Sums()}
        self._recorder = recorder
        self._world = distributed.group
        self._group_type, self._work_type = distributed.ProcessGroup, distributed.Work
        self._exchanges: weakref.WeakSet[Any] = weakref.WeakSet()  # works under way
        self._waited_ns = self._among_all_ns = 0
        self._is_among_all = False

    def wrap(self, original: Any) -> Any:
        return spanned(original, self._recorder, self.before, self.waited)

    def wrap_exchange(self, original: Any) -> Any:
        return spanned(original, self._recorder, self._before_exchange, self.waited)

    def wrap_wait(self, original: Any) -> Any:
        return spanned(original, self._recorder, self._before_wait, self._waited_for)

    def wrap_maker(self, original: Any) -> Any:
        return around(original, after=self._begun)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 2) -> int:
        recorder = self._recorder
        if recorder.current in INSIDE:
            caller = sys._getframe(depth).f_globals.get("__name__", "")
            if caller.partition(".")[0] not in TRAINERS:
                in_model = recorder.current == FORWARD
                slot = self._before_exchange(args, kwargs)
                if slot >= 0 and in_model:
                    self._is_among_all = not any(map(self._is_apart, (*args, *kwargs.values())))
                return slot
        return -1 if recorder.current == COMMUNICATION else COMMUNICATION

    def _is_apart(self, argument: Any) -> bool:
        """Whether a call that is given this may be one of some ranks only."""
        if isinstance(argument, self._group_type):
            return argument is not self._world.WORLD
        return isinstance(argument, self._work_type)

    def _before_exchange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._recorder.current == COMMUNICATION:
            return -1
        self.begun_ns, self._is_among_all = self._recorder.clock(), False
        return COMMUNICATION + THEN

    def _before_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        work, sums = args[0], self.sums
        if work in self._exchanges or work in sums["averaging"].works or work in sums["handed_on"].works:
            return self._before_exchange(args, kwargs)
        return self.before(args, kwargs, 3)

    def waited(self, args: tuple[Any, ...], result: Any) -> None:
        recorder = self._recorder
        took_ns = recorder.clock() - self.begun_ns
        self._waited_ns += took_ns
        self._among_all_ns += took_ns if self._is_among_all else 0
        if recorder.current in INSIDE and isinstance(result, self._work_type):
            self._exchanges.add(result)  # wherever it is waited for
        if "exchanges" not in recorder.facts:
            self._tell()

    def _waited_for(self, args: tuple[Any, ...], result: Any) -> None:
        took_ns = self._recorder.clock() - self.begun_ns
        for name, sums in self.sums.items():
            if args[0] in sums.works:
                sums.works[args[0]].waited_ns += took_ns
                if name != "averaging_inside":
                    return
        self.waited(args, result)

    def _begun(self, args: tuple[Any, ...], work: Any) -> None:
        self._recorder.guarded(self._begins, work)

    def _begins(self, work: Any) -> None:
        if "exchanges" not in self._recorder.facts:
            self._tell()
        if work is not None:
            self._exchanges.add(work)

    def _tell(self) -> None:
        told = {"waited_ns": self._waited_ns, "among_all_ns": self._among_all_ns}
        self._recorder.facts["exchanges"] = told

    def tell_sums(self, name: str) -> None:
        recorder = self._recorder
        models = recorder.met.live_modules()
        trained = {id(p): p.numel() for model in models for p in model.parameters() if p.requires_grad}
        recorder.facts[name] = {
            **self.sums[name].figures(),
            "rounds": recorder.rounds,
            "trained": sum(trained.values()),
            "trained_tensors": len(trained),
        }

    def tell_more(self) -> None:
        if "exchanges" in self._recorder.facts:
            self._tell()
        for name in self.sums:
            if name in self._recorder.facts:
                self.tell_sums(name)


class _SumCalls:
    """The calls of one function of `SUMS`, by which gradients or what was updated may go to other ranks."""

    def __init__(self, name: str, calls: _Calls, recorder: Recorder) -> None:
        from torch import Tensor, distributed
        from torch._C import _current_autograd_node

        self._name, self._calls, self._recorder = name, calls, recorder
        self._tensor_type, self._num_ranks = Tensor, distributed.get_world_size
        self._node_under_way = _current_autograd_node
        # Of the call under way:
        self._kind, self._elements, self._is_inside = "", 0, False
        self._line: Line | None = None

    def wrap(self, original: Any) -> Any:
        return spanned(original, self._recorder, self._before, self._ended)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        slot = self._calls.before(args, kwargs, 3)
        if slot < 0:
            return slot
        self._line, self._is_inside = None, slot != COMMUNICATION
        caller = sys._getframe(2)
        self._kind = self._kind_of(caller)
        if not self._kind:
            return slot
        place, argument = SUMS[self._name]
        tensor = args[place] if len(args) > place else kwargs.get(argument)
        if (
            not isinstance(tensor, self._tensor_type)
            or not tensor.is_floating_point()
            or tensor.numel() <= 1
        ):
            return slot  # a single number is a loss for the log
        self._elements = tensor.numel()
        if self._kind == "handed_on":
            self._elements *= HAND_ON[self._name] or self._num_ranks()
        sums = self._calls.sums[self._kind]
        self._line = sums.line(caller, tensor, self._recorder.met.live_modules)
        self._calls.begun_ns = self._recorder.clock()
        return COMMUNICATION + THEN

    def _kind_of(self, caller: FrameType) -> str:
        """What a call may be for, by its name in `facts`: gradients that no optimizer has used, if the loop
        asks for it, or what the script has torch call when a parameter has its gradient or an optimizer
        steps. Or what an optimizer has updated. Empty where it is for neither."""
        recorder = self._recorder
        if recorder.backward_passes == recorder.passes_stepped:
            hands_on = self._name in HAND_ON and not self._is_inside and recorder.backward_passes
            return "handed_on" if hands_on else ""
        if not self._is_inside:
            return "averaging"
        current = recorder.current
        if current not in (BACKWARD, OPTIMIZER) or owner(caller.f_code) != USER:
            return ""
        # Of all nodes of a graph, one that leaves a gradient in a parameter has it by that name.
        of_gradients = current == OPTIMIZER or hasattr(self._node_under_way(), "variable")
        return "averaging_inside" if of_gradients else ""

    def _ended(self, args: tuple[Any, ...], result: Any) -> None:
        took_ns = self._recorder.clock() - self._calls.begun_ns
        if self._is_inside:
            self._calls.waited(args, result)
        line, kind = self._line, self._kind
        if line is None:
            return
        sums, summed = self._calls.sums[kind], self._name != "broadcast" or kind == "handed_on"
        sums.add(line, self._elements, took_ns, self._recorder.backward_passes, summed=summed)
        if result is not None:
            sums.works[result] = line
        if kind not in self._recorder.facts:
            self._calls.tell_sums(kind)
