"""Batches copied to page-locked memory before the script gets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import _utils

from diagnose.actions._careful import Failure, in_short
from diagnose.actions._loader_choice import obstacle
from diagnose.actions._loader_service import on_every_feed, put_on, shape
from diagnose.actions._loader_switch import Feed, feed_of
from diagnose.actions._nested import tensors
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._signals import from_signal_handler

WRITTEN = "the script writes to its batches: from pinned memory the device may read them later than before"

Versions = list[tuple[ref[torch.Tensor], int]]
"""Tensors of a batch, each with its version when it was handed out."""


class PinMemory(Action):
    """Pins the batches of a loader that does not, so that the copy to the GPU is one copy and not two.

    ## What it does
    Copies each batch to page-locked memory, as `pin_memory=True` does, before the loop gets it. The driver
    then reads it directly; where the script copies with `non_blocking=True`, the loop goes on meanwhile.

    ## When it takes effect
    With the next batch.

    ## When it cannot help
    On a machine without a GPU, where it is refused. Where batches are small: pinning costs a copy on the
    training thread. In the script it is done by a thread of its own, if the loader has workers. Where a
    batch cannot be pinned the loop gets it as it is, and the action is taken back.

    ## Hazards
    From ordinary memory `to(device, non_blocking=True)` returns when the batch has been read; from pinned
    memory it is read later, when the device comes to it. A script that then writes to the batch trains on
    what it has written. Where a batch was written to by the time the next one is asked for, no more are
    pinned, and the action is taken back. Torch does not see what is written through `tensor.numpy()` or
    `tensor.data`.

    ## What was measured
    Nothing yet on a GPU: the tuner measures it in pairs of windows on the job itself.
    """

    safety = Safety.EXACT
    order = 20

    def check(self, job: Job) -> None:
        if job.device == "cpu" or not torch.accelerator.is_available():
            raise CannotApply("the model is not on an accelerator: there is nothing to copy to")
        _unpinned(job)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        yield Failure()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        prepared.refuse_again()
        handed: WeakKeyDictionary[Feed, Versions] = WeakKeyDictionary()

        def pin(feed: Feed, data: Any) -> Any:
            if not prepared.reason and _written(handed.pop(feed, [])):
                prepared.reason = WRITTEN
            if prepared.reason:
                return data
            try:
                pinned = _utils.pin_memory.pin_memory(data)
                handed[feed] = _versions(pinned)
                return pinned
            except Exception as error:
                if from_signal_handler(error.__traceback__):
                    raise  # the script's own
                prepared.reason = f"a batch cannot be pinned: {in_short(error)}"
                return data

        def begins(loader: Any, batches: Any) -> None:
            if not batches._pin_memory and not obstacle(loader, batches):
                feed_of(batches).put(pin)

        with on_every_feed(job, lambda: put_on(_unpinned(job), pin), begins, pin):
            yield

    def why_not_stay(self, prepared: Any) -> str:
        return str(prepared.reason)

    def state(self, job: Job) -> Any:
        return shape(job)

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"DataLoader.pin_memory": "True"}


def _versions(batch: Any) -> Versions:
    # An inference tensor counts no versions: it is one of an evaluation.
    return [(ref(tensor), tensor._version) for tensor in tensors(batch) if not tensor.is_inference()]


def _written(versions: Versions) -> bool:
    """Whether something was written to a tensor that is still there."""
    return any((tensor := of()) is not None and tensor._version != version for of, version in versions)


def _unpinned(job: Job) -> list[Any]:
    """Returns the iterators whose batches are in ordinary memory.

    Raises:
        CannotApply: If there is none.
    """
    pairs = list(zip(job.loaders, job.iterators, strict=True))
    if not pairs:
        raise CannotApply("no DataLoader feeds the training loop")
    reasons = [obstacle(loader, batches) for loader, batches in pairs]
    served = [batches for (_, batches), reason in zip(pairs, reasons, strict=True) if not reason]
    if not served:
        raise CannotApply(reasons[0])
    found = [batches for batches in served if not batches._pin_memory]
    if not found:
        raise CannotApply("the loader pins its batches already")
    return found
