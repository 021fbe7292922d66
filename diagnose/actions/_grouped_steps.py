"""Lets an optimizer step once on the mean of several gradients, where the script steps on each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from diagnose.actions._blame import raised_by_us
from diagnose.actions._careful import in_short
from diagnose.actions._gone import emptied_with, entered
from diagnose.actions._learning_rate import Rate
from diagnose.actions._loader_sampler import length
from diagnose.actions._memory import available_bytes
from diagnose.actions._optimizers import parameters_of
from diagnose.actions._routes import routed
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.hooks._signals import from_signal_handler

MEMORY_SHARE = 0.25
"""Of the memory that is available, sums of gradients may take so much."""


class GroupedSteps:
    """Collects what an optimizer is given at each of the script's steps, and steps on the mean.

    Before torch's own step the gradients are added to sums of ours. Unless the group is whole they are then
    hidden, so that the step finds nothing to do; else the means take their place. After the step every
    parameter has the script's gradient again. So all that the script does between two steps, clearing,
    scaling, clipping, looking, is done to the gradients that it knows.

    Args:
        epoch_ends: Whether the batch that has been trained on is the last one of the epoch.
        alone: Whether no other process steps together with this one.

    Attributes:
        refused: Why the script's steps are left alone after all; empty while they are not.
        pending: Gradients that were collected since the last step on a mean.

    Raises:
        CannotApply: If there is no memory for the sums.
    """

    def __init__(self, optimizer: Optimizer, epoch_ends: Callable[[], bool], *, alone: bool = True) -> None:
        self.refused = ""
        self.pending = 0
        self._epoch_ends = epoch_ends
        self._alone = alone
        self._size = 1
        self._rate = Rate(optimizer)
        self._sums = _sums(optimizer)
        self._present: dict[torch.Tensor, None] = {}  # parameters that have a sum by now, in order
        self._optimizer = emptied_with(optimizer, self._sums, self._present)
        self._theirs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._stepping = self._finishing = False
        self._thread = 0
        self._is_between_steps = False
        self._job: Job | None = None

    @contextmanager
    def installed(self, size: int, job: Job) -> Iterator[None]:
        """Groups steps while open. On leaving, what has been collected is stepped on.

        Args:
            size: How many of the script's steps make one.
        """
        with ExitStack() as stack:
            optimizer = self._optimizer()
            if optimizer is not None:
                self._hang_on(optimizer, size, job, stack)
            del optimizer
            yield

    def _hang_on(self, optimizer: Optimizer, size: int, job: Job, stack: ExitStack) -> None:
        self._size, self._rate, self._job = size, Rate(optimizer), job
        stack.callback(self._finish)
        if self._alone:  # a checkpoint, which one of several ranks may write
            stack.callback(optimizer.register_state_dict_pre_hook(self.epoch_is_over).remove)
        entered(stack, (routed(job, each, self._forward) for each in job.models))
        stack.callback(optimizer.register_step_pre_hook(self.before).remove)
        stack.callback(optimizer.register_step_post_hook(self.after).remove)

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The script steps."""
        if is_dynamo_compiling() or optimizer is not self._optimizer() or self._finishing:
            return
        try:
            self._before(optimizer, args, kwargs)
        except Exception as error:
            if not raised_by_us(error):
                raise
            self.after()
            self.refused = f"it failed in use: {in_short(error)}"

    def _forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The loop calls a model in training: a step that it does not know of must wait for its own."""
        self._is_between_steps = False
        return call(*args, **kwargs)

    def epoch_is_over(self, *_: Any) -> None:
        """The loop has left its batches, begins with others, or saves: what has been collected is stepped
        on, if this is the moment between two steps that it seems to be."""
        if self.pending and self._is_between_steps and not self.refused and get_ident() == self._thread:
            try:
                self._finish()
            except Exception as error:
                if from_signal_handler(error.__traceback__):
                    raise  # the script's own
                self.refused = f"it failed in use: {in_short(error)}"

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._thread, self._is_between_steps = get_ident(), False
        self._recover()
        given = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        self.refused = self.refused or self._why_not(optimizer, args, kwargs, given)
        if self.refused or not given:
            return
        self._collect(given)
        if self.pending < self._size and not self._epoch_ends():
            self._theirs = list(given)
            for p, _ in given:
                p.grad = None
        else:
            self._show_means()

    def after(self, *_: Any) -> None:
        """The step is over: the script finds its own gradients and settings."""
        for p, gradient in self._theirs:
            p.grad = gradient
        self._theirs = []
        self._rate.restore()
        self._is_between_steps = True
        if self._stepping:
            self._begin_group()

    def _collect(self, given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        new = [(self._sums[p], gradient) for p, gradient in given if p not in self._present]
        more = [(self._sums[p], gradient) for p, gradient in given if p in self._present]
        with torch.no_grad():
            if new:
                torch._foreach_copy_(*map(list, zip(*new, strict=True)))  # type: ignore[arg-type]
            if more:
                torch._foreach_add_(*map(list, zip(*more, strict=True)))
        self._present.update(dict.fromkeys(p for p, _ in given))
        self.pending += 1

    def _show_means(self) -> None:
        means = [self._sums[p] for p in self._present]
        with torch.no_grad():
            torch._foreach_div_(means, self.pending)
        self._stepping = True
        self._theirs = [(p, p.grad) for p in self._present]
        for p, mean in zip(self._present, means, strict=True):
            p.grad = mean
        self._rate.grow(self.pending)

    def _begin_group(self) -> None:
        self._stepping, self.pending = False, 0
        self._present.clear()

    def _recover(self) -> None:
        """After a step that raised an exception: its gradients are not the script's any more."""
        if not self._theirs:
            return
        self._rate.restore()
        for p, _ in self._theirs:
            if p.grad is not None and p.grad is self._sums.get(p):
                p.grad = p.grad.clone()  # the script has gone on with it
        self._theirs = []
        if self._stepping:
            self._begin_group()

    def _finish(self) -> None:
        self._recover()
        optimizer = self._optimizer()
        if not self.pending or self._job is None or optimizer is None:
            return
        try:
            self._finishing = True
            self._show_means()
            with self._job.unmeasured():
                optimizer.step()
        finally:
            self._finishing = False
            self.after()

    def _why_not(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> str:
        if len(args) > 1 or kwargs:
            return "the step computes its loss itself"
        if getattr(optimizer, "found_inf", None) is not None:
            return "the script's GradScaler leaves it to the fused step to unscale gradients"
        for p, gradient in given:
            if p not in self._sums:
                return "parameters were added to the optimizer"
            if gradient.layout is not torch.strided or gradient.dtype is not p.dtype:
                return "some gradients are sparse, or of another type than their parameters"
        return ""


def _sums(optimizer: Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    params = [p for p in parameters_of(optimizer) if p.requires_grad]
    on_host = sum(p.numel() * p.element_size() for p in params if p.device.type == "cpu")
    if on_host > available_bytes() * MEMORY_SHARE:
        raise CannotApply(f"sums of gradients take {on_host >> 20} MiB: a quarter of the memory is less")
    try:
        return {p: torch.empty_like(p, requires_grad=False) for p in params}
    except torch.OutOfMemoryError as error:
        raise CannotApply("there is no memory for sums of gradients") from error


class Epoch:
    """Tells when the loop has taken the last batch of an epoch, or has left it.

    Args:
        job: The job, between two steps.
        is_over: Called when it has left it, or begins another.
        left: Whether leaving it is noticed at once: else when another one begins.
    """

    def __init__(self, job: Job, is_over: Callable[[], None], *, left: bool) -> None:
        self._is_over, self._left = is_over, left
        self._batches: Callable[[], Any] = lambda: None
        self._length: int | None = None
        if job.iterators:
            self._follow(job.loaders[-1], job.iterators[-1])

    def begins(self, loader: Any, batches: Any) -> None:
        """The loop begins to iterate for training."""
        self._is_over()
        self._follow(loader, batches)

    def _follow(self, loader: Any, batches: Any) -> None:
        self._batches = ref(batches, self._gone if self._left else None)
        self._length = length(loader)

    def _gone(self, batches: ref[Any]) -> None:
        """CPython drops an iterator when the loop over it is left."""
        if not sys.is_finalizing():
            self._is_over()

    def ends(self) -> bool:
        """Whether there is no other batch, as far as anybody knows."""
        taken = getattr(self._batches(), "_num_yielded", None)
        return self._length is not None and taken is not None and taken >= self._length
