"""Computes a step again, in a smaller way, instead of dying of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from diagnose.actions._boundary import Gradients, check_torch
from diagnose.actions._checkpointed import checkpointed
from diagnose.actions._memory import refuse_unless_short
from diagnose.actions._nested import tensors
from diagnose.actions._pieces import CannotSplit, Pieces, copied
from diagnose.actions._routes import all_routed, models_with_weights, routes_in_force
from diagnose.actions._sealed import refuse_unsealed
from diagnose.actions._splitting import refuse_coupled, refuse_sharded
from diagnose.actions.activation_checkpointing import blocks_of
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.micro_batching import rehearse
from diagnose.core.errors import is_short_of_memory
from diagnose.core.job import Job, Route
from diagnose.core.trial import Safety

PIECES = (2, 4, 8, 16)

MOST_BUFFER_BYTES = 16 << 20
"""Buffers are copied before each call, so that one that failed half-way can be taken back."""


class OomReplay(Action):
    """A step that runs out of memory is computed again in a smaller way; the script does not notice.

    ## What it does
    The model's call is put behind one node of autograd. Where it runs out of memory, forward or backward,
    by `torch.OutOfMemoryError` or by what cuDNN and cuBLAS say then, what it had computed is freed,
    generators and buffers are set back, and it is made again: first as it was, with the allocator's cache
    emptied, then with the blocks' activations computed twice instead of kept, and then, if the samples do
    not know of each other, in 2, 4, 8 and 16 pieces. The loss, which is the script's, is not computed
    again: the gradient it sent is still there.

    ## When it takes effect
    At the next call of the model. Under DDP a replay is each rank's own affair: its reducer sees every
    gradient once. While it is in force communication begins when the model's backward pass has ended.

    ## When it cannot help
    On a CPU, where the operating system ends the process instead of raising. Memory that runs out in the
    script's loss or in `optimizer.step` is outside the model's call. It makes no step faster, so it is
    armed only while memory is short; named with `--only`, or in a file for `--apply`, it stays all the
    same, unless steps take twice as long. Models with batch norm or dropout are not cut in pieces. It is
    refused where a loop reads more of a call than its outputs: a penalty noted on a module, features that a
    hook keeps.
    """

    safety = Safety.ROUNDING
    order = 60
    excludes = frozenset({"micro-batching", "regional-compile", "activation-checkpointing"})
    touches = "model"
    frees_memory = True
    hangs_on = ("models",)

    def check(self, job: Job) -> None:
        if torch.device(job.device).type == "cpu":
            raise CannotApply("on a CPU the operating system ends the process instead of raising an error")
        refuse_unless_short(job)
        check_torch()
        for model in models_with_weights(job):
            refuse_unfit(model)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """Finds out which models may be cut in pieces."""
        yield WeakKeyDictionary({model: _ladder(job, model) for model in models_with_weights(job)})

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:

        def route_of(model: nn.Module) -> Route:
            refuse_unfit(model)
            if model not in prepared:
                raise CannotApply("the loop calls another model than it did")
            return _route(prepared[model])

        return all_routed(job, route_of)

    def state(self, job: Job) -> Any:
        return routes_in_force(job)


def refuse_unfit(model: nn.Module) -> None:
    """Raises `CannotApply` if a failed call of the model could not be taken back."""
    refuse_sharded(model)
    num_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if num_bytes > MOST_BUFFER_BYTES:
        raise CannotApply(f"its buffers, {num_bytes >> 20} MB, are too large to be copied before each call")


Rung = tuple[str, int]
"""A way to make the call: `whole`, `checkpointed` or `pieces`, and how many of these."""


def _ladder(job: Job, model: nn.Module) -> tuple[Rung, ...]:
    refuse_unsealed(job, model)
    rungs: list[Rung] = [("whole", 1)]
    if blocks_of(model):
        rungs.append(("checkpointed", 1))
    try:
        refuse_coupled(model)
        rehearse(job, model)
    except CannotApply:
        return tuple(rungs)
    return (*rungs, *(("pieces", number) for number in PIECES))


def _route(ladder: Sequence[Rung]) -> Route:
    def route(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Replaying(call, args, kwargs, ladder).run()

    return route


class Replaying(Pieces):
    """A call that is made again in another way where memory runs out.

    Args:
        ladder: The ways, in order.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ladder: Sequence[Rung],
    ) -> None:
        super().__init__(call, args, kwargs, num_pieces=1)
        self._ladder = ladder
        self._input_versions = self._versions_of_inputs()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.inner.buffers()]

    def forward(self) -> Any:
        try:
            return self.whole(self.model)
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            failure = error.with_traceback(None)  # whose frames hold the activations
        for rung in self._ladder:
            self._take_back()
            try:
                with _broadcast_already(self.model):
                    return self._forward_by(rung)
            except RuntimeError as error:
                if not is_short_of_memory(error):
                    raise
                failure = error.with_traceback(None)
            except CannotSplit:
                break
        raise failure

    def backward(self, gradients: Gradients, keep: bool) -> Gradients:
        try:
            return super().backward(gradients, keep)
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            failure = error.with_traceback(None)
        if self._input_versions != self._versions_of_inputs():
            raise failure  # the script has written to them since: there is nothing to begin with
        for rung in self._ladder:
            if self._bounds and rung[1] <= len(self._bounds):
                continue  # its pieces were too large already
            self.free()
            _empty_caches()
            try:
                return self._backward_by(rung, gradients)
            except RuntimeError as error:
                if not is_short_of_memory(error):
                    raise
                failure = error.with_traceback(None)
        raise failure

    def _forward_by(self, rung: Rung) -> Any:
        way, self.num_pieces = rung
        self._kept = copied(self.inputs) if way == "pieces" else self.inputs
        with checkpointed(blocks_of(self.inner)) if way == "checkpointed" else nullcontext():
            return self.in_pieces(self.model) if way == "pieces" else self.whole(self.model)

    def _backward_by(self, rung: Rung, gradients: Gradients) -> Gradients:
        way, number = rung
        if way == "pieces":
            self.cut(number)
            return self.sum_of_pieces(gradients)
        with (
            self.again(),
            checkpointed(blocks_of(self.inner)) if way == "checkpointed" else nullcontext(),
        ):
            self.whole(self.inner)
            return self.pull(self._ends, self._inner_starts, gradients, False)

    def _take_back(self) -> None:
        """Makes undone what the failed call did, and frees what it held."""
        self.free()
        self.random.restore()
        for buffer, before in self._buffers:
            buffer.data.copy_(before)  # `.data`: another graph may hold the buffer, at its present version
        _empty_caches()

    def _versions_of_inputs(self) -> list[int]:
        return [tensor._version for tensor in tensors(self.inputs)]


@contextmanager
def _broadcast_already(model: nn.Module) -> Iterator[None]:
    """Inside, DDP sends no buffers: the other ranks take no part in a second call."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return
    before = model.require_forward_param_sync
    model.require_forward_param_sync = False
    try:
        yield
    except BaseException:
        model.require_forward_param_sync = before
        raise
    # Else the call has set it: to what it wants at its next one.


def _empty_caches() -> None:
    gc.collect()  # a cycle may hold activations
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
