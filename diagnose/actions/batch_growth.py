"""Several of the script's batches as one larger batch"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from diagnose.actions._gone import entered
from diagnose.actions._grown_batches import FEWEST_BATCHES, GrownBatches, refuse_unfit
from diagnose.actions._learning_rate import Rate, refuse_without_rule
from diagnose.actions._memory import allocator_of, available_bytes, free_at_peak, resident_bytes
from diagnose.actions._optimizers import hooks_on
from diagnose.actions._schedules import Schedules
from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._looks import added

SIZES = (2, 4)
"""The script's batches in one. The more, the fewer steps there are to learn in: what goes further is for
the script's author to say."""

MEMORY_SHARE = 0.8
"""Of the memory that is free, so much may be what the peak of a step grows by."""


class BatchGrowth(Action):
    """
    ## What it does
    Lets the script's `DataLoader` hand out two or four batches as one: what a step costs however many
    samples it has, in Python, in launches, in the optimizer and between ranks, is paid for more of them.
    The order of samples is the script's, and each comes once in an epoch. The last batch of an epoch has
    what is left.

    The learning rate grows with the batch: k times with SGD, the root of k times with Adam and its kind, in
    a ramp of 100 steps. It does so during the step alone: the script and its logs see their own rate. A
    schedule of torch's that the script steps in every step goes on by the script's batches: it is stepped
    as often as there are batches in one. One that goes by epochs is left alone.

    ## When it takes effect
    After an epoch in which the loop has asked for one batch more than there are, as `for` does: a loop that
    counts its batches would find too few. Then with the next batch that is drawn. What workers have made by
    then comes first, and so it does on leaving; the learning rate goes by the batch that was really taken.

    ## How it is measured
    By the time per sample, as steps have more of them.

    ## When it cannot help
    Where a step's time grows with its batch: large models, and CPUs.

    ## When it is refused
    For an `IterableDataset`, a batch sampler of the script's own, loaders without batches, several loaders;
    where an epoch would have fewer than four larger batches; where the memory that a step needs at its peak
    may not be there k times; for optimizers for which no rule is known, see `gradient-accumulation`; where
    the script sets the learning rate itself in each step.

    ## Hazards
    Training takes fewer, longer steps: another training, hence `--allow training`, and tried only when
    named with `--only batch-growth`. The loss is watched. The script's own counters move: it sees fewer
    batches in an epoch, so that what it does every so many steps comes later, and a loop that ends after so
    many steps has seen more samples. `len(loader)` stays. Batch normalization sees larger batches, and a
    loss that is a sum over the batch is larger. In the script, ask the loader for a larger `batch_size`.
    """

    safety = Safety.TRAINING
    excludes = frozenset({"gradient-accumulation"})
    resizes = True
    hangs_on = ("optimizers",)

    def check(self, job: Job) -> None:
        refuse_unfit(job)
        if not job.epochs_ended:
            raise NotYet("the loop has not asked for a batch beyond an epoch's last one yet: it may count")
        refuse_without_rule(job)
        if not self.values(job):
            num_batches = len(job.iterators[-1]._index_sampler)
            if num_batches < SIZES[0] * FEWEST_BATCHES:
                raise CannotApply(f"an epoch has {num_batches} batches only")
            raise CannotApply("a step may need more memory for a larger batch than is free")

    def values(self, job: Job) -> Sequence[int | None]:
        num_batches = len(job.iterators[-1]._index_sampler)
        peak, free = _peak_bytes(job), _free_bytes(job)
        return [
            size
            for size in SIZES
            if num_batches >= size * FEWEST_BATCHES and peak * (size - 1) <= free * MEMORY_SHARE
        ]

    def largest(self, job: Job) -> int | None:
        return max((value for value in self.values(job) if value is not None), default=None)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        self.check(job)
        batches = job.iterators[-1]
        ahead = (
            batches._num_workers * getattr(batches, "_prefetch_factor", 0) if batches._num_workers else 0
        )
        del batches
        self.settle_steps = max(self.settle_steps, ahead + 1)
        yield value or SIZES[0], GrownBatches(job), Schedules(list(job.optimizers))

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        size, grown, schedules = prepared
        if refused := grown.refused or schedules.refused:
            raise CannotApply(refused)

        def ended() -> None:
            schedules.step_ended(grown.parts(), job)

        with ExitStack() as stack:
            entered(stack, (_faster(each, grown) for each in job.optimizers))
            stack.enter_context(schedules.installed())
            stack.enter_context(grown.installed(size, job))
            stack.enter_context(added(job.on_step, ended))
            yield

    def why_not_stay(self, prepared: Any) -> str:
        _, grown, schedules = prepared
        return str(grown.refused or schedules.refused)

    def state(self, job: Job) -> Any:
        return (
            _BaseDataLoaderIter._next_index,
            len(job.on_iterator),
            len(job.on_step),
            [hooks_on(optimizer, "step_pre", "step_post") for optimizer in job.optimizers],
        )


@contextmanager
def _faster(optimizer: Optimizer, grown: GrownBatches) -> Iterator[None]:
    """Lets an optimizer step as far as the batch is large while open."""
    rate, mine = Rate(optimizer), ref(optimizer)

    def before(stepping: Optimizer, *_: Any) -> None:
        if stepping is mine():
            rate.restore()  # the last step raised
            try:
                rate.grow(max(1.0, grown.parts()))
            except Exception as error:  # noqa: BLE001 (ours: the script's step goes on, at its own rate)
                rate.restore()
                grown.failed(error)

    with ExitStack() as stack:
        stack.callback(rate.restore)
        stack.callback(optimizer.register_step_pre_hook(before).remove)
        stack.callback(optimizer.register_step_post_hook(lambda *_: rate.restore()).remove)
        del optimizer
        yield


def _peak_bytes(job: Job) -> int:
    """Returns at most what a step needs beyond what stays."""
    if job.device == "cuda":
        told = allocator_of(job)
        return told["peak_allocated_bytes"] - told["allocated_bytes"]
    return resident_bytes()


def _free_bytes(job: Job) -> float:
    return free_at_peak(job) if job.device == "cuda" else available_bytes() / max(1, job.local_ranks)
