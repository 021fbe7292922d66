"""Which of a script's backward passes need their gradients averaged: the last one of each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from diagnose.actions._gone import emptied_with
from diagnose.actions._loader_sampler import length
from diagnose.actions._plain_sum import PlainSum
from diagnose.core.job import Job

SAME_STEPS = 3
"""Steps in a row that took the same number of passes, before the number is believed."""


class Accumulation:
    """Counts the backward passes of a DDP model in each step, and leaves out the averages before the last.

    A pass is averaged or not as its forward call was made inside of `no_sync` or outside. DDP averages
    what has been accumulated, so that one average after the last pass is enough where the passes are summed
    up and nothing else.

    A pass that one rank averages and another does not hangs the job, or spoils its weights. So that goes by
    what is the same on every rank: backward passes of the model, steps, and epochs of a length that all
    ranks have (see `alike`). What a rank sees alone makes it ask all of them to stop.

    Attributes:
        leaves_out: Whether averages are left out, as far as the number of passes is known.
        passes: How many passes a step takes; 0 while that is not known.
        unclear: So many steps have to be seen yet before `passes` is to be relied on.
        pending: Whether gradients have been accumulated that were not averaged.
        alike: What has to be the same on every rank.
    """

    def __init__(self, job: Job, model: Any) -> None:
        self.leaves_out = False
        self.passes = 0
        self.unclear = SAME_STEPS
        self.pending = False
        self._sum = PlainSum(model, self._goes_back)
        self._job = job
        self._model = emptied_with(model, self._sum.parameters)
        self._in_step = 0  # passes of this step so far
        self._is_left_out = False  # the latest call
        self._same = (0, 0)  # passes of the last steps, and how many steps in a row took so many
        self._seen_passes = job.backward_passes
        self._length = (length(job.loaders[-1]) or None) if job.loaders else None  # of an epoch, in batches
        self._batches_left = self._length
        self._feeds = weakref.ref(job.iterators[-1]) if self._length else None
        self._reason = ""
        if self._length:
            taken: int = getattr(job.iterators[-1], "_num_yielded", 0)
            self._batches_left = self._length - taken % self._length
        self.alike = f"{self._batches_left or 'unknown'} of {self._length or 'unknown'} batches are left"

    @property
    def reason(self) -> str:
        """Why averages must not be left out; empty as long as nothing speaks against it."""
        return self._sum.reason or self._reason

    def route(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        self._sum.begins(first=not self._in_step)
        self._is_left_out = self.leaves_out and self._another_comes()
        if self._is_left_out:
            with args[0].no_sync():
                output = call(*args, **kwargs)
            # Buffers go to all ranks before the next pass, as ever.
            args[0].require_forward_param_sync = True
        else:
            output = call(*args, **kwargs)
        if not self._sum.called(output):
            self.pending = self._is_left_out  # its backward pass, if there is one, will not be seen
        return output

    def _another_comes(self) -> bool:
        """Whether this is surely not the step's last pass."""
        left = self.passes - self._in_step
        if left <= 1 or _scaled():
            return False
        # The last step of an epoch may have to do with fewer.
        return self._batches_left is None or self._batches_left >= left

    def _goes_back(self) -> None:
        """A backward pass goes through the model: of calls alone, one rank may make some more."""
        self._in_step += 1
        self.pending = self._is_left_out
        if self._batches_left is not None:
            # Where passes are no batches this is no end of an epoch, and averages once too often.
            self._batches_left = self._batches_left - 1 or self._length

    def begins(self, loader: Any, iterator: Any) -> None:
        """The loop begins to iterate for training: a new epoch, if that before is over.

        A rank may also take a look at some batches by itself.
        """
        if self._feeds is None:
            return
        before = self._feeds()
        if before not in (None, iterator) and getattr(before, "_num_yielded", 0) < (self._length or 0):
            return
        self._batches_left = self._length
        self._feeds = weakref.ref(iterator)
        if (length(loader) or None) != self._length:
            self._reason = "epochs do not all have the same number of batches"
            self._feeds = None  # until all ranks stop, those that were agreed upon count

    def stepped(self) -> None:
        """A step has ended."""
        passes, self._in_step, self.pending = self._in_step, 0, False
        counted = self._job.backward_passes - self._seen_passes
        self._seen_passes += counted
        # Two models, or passes whose end nobody has seen.
        if (counted and counted != passes) or self._sum.seen != passes - 1:
            self.unclear = SAME_STEPS
        else:
            self.unclear = max(0, self.unclear - 1)
        self._same = (passes, self._same[1] + 1 if passes == self._same[0] else 1)
        if self._same[1] >= SAME_STEPS:
            self.passes = passes

    def average(self, *args: Any) -> None:
        """Before an optimizer steps: the step has ended before its usual time, and nothing is averaged."""
        if not self.pending:
            return
        self.pending = False
        model = self._model()
        if model is None:
            return
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is not None:
                    parameter.grad.div_(model.process_group.size())
                    distributed.all_reduce(parameter.grad, group=model.process_group)


def _scaled() -> bool:
    """Whether gradients of float16 are likely scaled: a scaler that finds one to be infinite skips the step
    on that rank alone unless they have been averaged."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        for device in ("cpu", "cuda")
    )
