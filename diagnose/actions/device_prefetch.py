"""The next batch copied to the GPU while the present one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diagnose.actions._careful import Failure, in_short
from diagnose.actions._device_copies import Copies, SideStream
from diagnose.actions._loader_ahead import NOTHING
from diagnose.actions._loader_choice import obstacle
from diagnose.actions._loader_purity import leaves
from diagnose.actions._loader_service import on_every_feed, put_on, shape
from diagnose.actions._loader_switch import Feed, feed_of, feeds
from diagnose.actions._memory import allocator_of, free_at_peak
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.core.units import format_bytes
from diagnose.hooks._signals import from_signal_handler

ROOM = 4
"""So many batches must find room at the peak: one in use, one on its way, and what blocks of other sizes
waste."""

CLOSELY = 2
"""So many batches of a window are kept as a whole to be compared with what the script sends in the end; of
those that follow, some elements are. Copying and reading all of 40 MB takes tens of milliseconds, in
steps that settle."""


class DevicePrefetch(Action):
    """Begins the copy of the next batch to the GPU before the script asks for it.

    ## What it does
    The script gets the batches it always got, on the CPU. When one is handed out and the workers have the
    next one ready, its tensors are copied to the GPU on a stream of their own, while the model computes.
    `tensor.to(device)` and `tensor.cuda()` then return that copy, if the tensor is the very object and
    nothing was written to it since. The script's stream waits for the copy to be complete; the script does,
    too, where it would have waited, from pinned memory and without `non_blocking`.

    ## When it takes effect
    With the batch after the next.

    ## When it cannot help
    Where no workers make the batches: the next one is not there early. Where the script changes batches on
    the CPU first, or asks for another type in the same call. On a machine without a GPU it is refused.

    ## Hazards
    Torch sees not all that is written to a tensor: nothing through `tensor.numpy()` or `tensor.data`. So
    the first two batches of each window are compared with what was sent, and 1024 elements of each tensor
    afterwards; where they differ the script gets a copy of its own, and the action is taken back. A script
    that changes, later and that way, so little of a batch that none of these elements is in it, would train
    on the batch without the change.

    ## Its price
    Memory on the GPU for one more batch. Where it is short at the peak the action is refused.

    ## What was measured
    The look-up on a CPU: hit, stale after a change in place, seen by torch or not, miss for other tensors.
    Nothing yet on a GPU: the tuner measures it in pairs of windows on the job itself.
    """

    safety = Safety.EXACT
    order = 21
    excludes = frozenset({"pin-memory"})  # which hands out other tensors than those that are copied
    settle_steps = 1 + CLOSELY  # the first step has no copy yet

    def check(self, job: Job) -> None:
        if job.device != "cuda" or not torch.cuda.is_available():
            raise CannotApply("the model is not on a GPU: there is nothing to copy to")
        allocator_of(job)
        _fed_by_workers(job)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """Makes the stream, one for all windows: the allocator keeps memory for each stream there was."""
        place = job.torch_device or torch.device("cuda", torch.cuda.current_device())
        yield SideStream(place), Failure()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        side, failure = prepared
        failure.refuse_again()
        copies, num_begun = Copies(side, failure), 0

        def copy_early(batch: Any) -> None:
            nonlocal num_begun
            try:
                if not num_begun:
                    failure.reason = why_foreign(batch) or why_too_large(job, batch)
                num_begun += 1
                if not failure.reason:
                    for tensor in leaves(batch):
                        copies.begin(tensor, closely=num_begun <= CLOSELY)
            except Exception as error:
                if from_signal_handler(error.__traceback__):
                    raise  # the script's own
                failure.reason = f"a copy could not be begun: {in_short(error)}"

        def look_ahead(feed: Feed, data: Any) -> Any:
            batch = NOTHING if failure.reason else feed.next_if_there()
            if batch is not NOTHING:
                copy_early(batch)
            return data

        def begins(loader: Any, batches: Any) -> None:
            if not obstacle(loader, batches):
                feed_of(batches).put(look_ahead)

        def start() -> None:
            put_on(_fed_by_workers(job), look_ahead)

        with copies.looked_up(), on_every_feed(job, start, begins, look_ahead):
            yield

    def why_not_stay(self, prepared: Any) -> str:
        return str(prepared[1].reason)

    def state(self, job: Job) -> Any:
        return shape(job), torch.Tensor.to, torch.Tensor.cuda


def why_foreign(batch: Any) -> str:
    """Returns why a batch is not for this; empty if it is. Libraries with tensors of their own may know
    `Tensor.to` by its identity, which is another while this is in force."""
    kind = next((type(tensor) for tensor in leaves(batch) if type(tensor) is not torch.Tensor), None)
    return f"a batch holds a {kind.__qualname__}, which is no plain tensor" if kind is not None else ""


def why_too_large(job: Job, batch: Any) -> str:
    """Returns why there is too little memory to have a second batch of this kind; empty if there is."""
    needed = ROOM * sum(tensor.numel() * tensor.element_size() for tensor in leaves(batch))
    free = free_at_peak(job)
    if free >= needed:
        return ""
    return f"copies of batches may need {format_bytes(needed)}; {format_bytes(free)} are free at the peak"


def _fed_by_workers(job: Job) -> list[Any]:
    """Returns the iterators whose next batch may be there early.

    Raises:
        CannotApply: If there is none.
    """
    served = {batches for batches, feed in feeds() if feed.active is not None}
    found, reason = [], "no DataLoader feeds the training loop"
    for loader, batches in zip(job.loaders, job.iterators, strict=True):
        obstructed = obstacle(loader, batches)
        if not obstructed and (batches in served or batches._num_workers):
            found.append(batches)
        reason = obstructed or "no workers make the batches: the next one is not there early"
    if not found:
        raise CannotApply(reason)
    return found
