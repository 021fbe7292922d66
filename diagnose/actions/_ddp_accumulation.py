"""Which of a script's backward passes need their gradients averaged: the last one of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from diagnose.actions._plain_sum import PlainSum
from diagnose.core.job import Job

SAME_STEPS = 3
"""Steps in a row that took the same number of passes, before the number is believed."""


class Accumulation:
    """Counts the calls of a DDP model in each step, and leaves out the averages before the last.

    A pass is averaged or not as its forward call was made inside of `no_sync` or outside. DDP averages
    what has been accumulated, so that one average after the last pass is enough where the passes are summed
    up and nothing else.

    Args:
        job: The job.
        model: The model, wrapped in DDP.

    Attributes:
        leaves_out: Whether averages are left out, as far as the number of passes is known.
        passes: How many passes a step takes; 0 while that is not known.
        pending: Whether gradients have been accumulated that were not averaged.
        sum: Whether the passes of a step are a plain sum.
    """

    def __init__(self, job: Job, model: Any) -> None:
        self.leaves_out = False
        self.passes = 0
        self.pending = False
        self.sum = PlainSum(model)
        self._job = job
        self._model = model
        self._calls = 0
        self._same = (0, 0)  # calls of the last steps, and how many steps in a row took so many
        self._seen_passes = job.backward_passes
        self._batches_left = _batches_left(job)
        self._counts_batches = True

    def route(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `core.job.Route`."""
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        self._calls += 1
        self.sum.begins(first=self._calls == 1)
        output = self._called(call, args, kwargs)
        self.sum.called(output)
        return output

    def _called(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._batches_left is not None:
            self._batches_left -= 1
            if self._batches_left < 0:  # passes are no batches of the loader
                self._batches_left, self._counts_batches = None, False
        if not (self.leaves_out and self._another_comes()):
            self.pending = False
            return call(*args, **kwargs)
        self.pending = True
        with self._model.no_sync():
            output = call(*args, **kwargs)
        # Buffers go to all ranks before the next pass, as ever.
        self._model.require_forward_param_sync = True
        return output

    def _another_comes(self) -> bool:
        """Whether this is surely not the step's last pass."""
        if self._calls >= self.passes or _scaled():
            return False
        # The last step of an epoch may have to do with fewer.
        return self._batches_left is None or self._batches_left >= self.passes - self._calls

    def begins(self, loader: Any, iterator: Any) -> None:
        """The loop begins to iterate for training."""
        if self._counts_batches:
            self._batches_left = _length(loader)

    def stepped(self) -> None:
        """A step has ended."""
        calls, self._calls, self.pending = self._calls, 0, False
        passes = self._job.backward_passes - self._seen_passes
        self._seen_passes += passes
        # A model that is called twice for one pass, two models, or passes whose end nobody has seen.
        if (passes and passes != calls) or self.sum.seen != calls - 1:
            self._same = (0, 0)
            self.passes = 0
            return
        self._same = (calls, self._same[1] + 1 if calls == self._same[0] else 1)
        if self._same[1] >= SAME_STEPS:
            self.passes = calls

    def average(self, *args: Any) -> None:
        """Before an optimizer steps: the step has ended before its usual time, and nothing is averaged."""
        if not self.pending:
            return
        self.pending = False
        model = self._model
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is not None:
                    parameter.grad.div_(model.process_group.size())
                    distributed.all_reduce(parameter.grad, group=model.process_group)


def _batches_left(job: Job) -> int | None:
    """How many batches the present epoch still has; `None` where that cannot be known."""
    if not job.loaders:
        return None
    length = _length(job.loaders[-1])
    taken = getattr(job.iterators[-1], "_num_yielded", None)
    return None if length is None or taken is None else length - taken


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _scaled() -> bool:
    """Whether gradients of float16 are likely scaled: a scaler that finds one to be infinite skips the step
    on that rank alone unless they have been averaged."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        for device in ("cpu", "cuda")
    )
