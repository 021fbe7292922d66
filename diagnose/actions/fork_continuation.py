"""One worker process makes random samples with the numbers that training would have drawn"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.actions._loader_choice import PREFETCH_FACTOR, Source, sources
from diagnose.actions._loader_continued import ContinuingPool
from diagnose.actions._loader_service import started
from diagnose.actions._loader_serving import LoaderServing
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class ForkContinuation(LoaderServing):
    """
    ## What it does
    Forks one worker process for a loader that has none and whose samples are random: augmented images,
    masked text. The worker is given the states of torch's, Python's and NumPy's generators, makes the next
    batches with them, and sends the states that each batch left behind. When a batch is handed out the
    training process takes these states: all later numbers, such as the order of the next epoch, are those
    that it would have drawn without a worker. Samples, their order and all random numbers stay the same bit
    for bit, which `loader-workers` can promise only where samples are not random.

    ## When it takes effect
    With the next batch. On leaving, what the worker was asked for is handed out first.

    ## When it cannot help
    It is one worker, as the numbers of a batch follow from those of the one before: the most that it wins
    is that batches are made while the model computes. Where other numbers will do,
    `loader-workers-reseeded` has more workers, with `--allow training`.

    ## When it is refused
    Where `loader-workers` is, save for random samples; where samples are not random, or the loader has
    workers. It gives itself up where the training loop draws numbers on the CPU in each step, as dropout on
    a CPU does: what the worker has made is then void.

    ## What watches it
    Before a batch is handed out the generators are compared with the states that it was begun with. Where
    somebody has drawn, as an evaluation does, the batch and those after it are made in the training
    process, and the worker begins again. The first batch is made in the training process, too, and compared
    bit for bit.
    """

    safety = Safety.EXACT
    excludes = frozenset({"loader-workers", "loader-workers-reseeded", "dataset-cache", "device-prefetch"})
    settle_steps = PREFETCH_FACTOR + 1

    def served(self, job: Job) -> list[Source]:
        found = sources(job, reseeded=True)
        if len(found) > 1:
            raise CannotApply(
                "several loaders feed training, and draw from the same random numbers in turn"
            )
        (source,) = found
        if source.batches._num_workers:
            raise CannotApply("the loader has workers, whose random numbers are their own")
        if not source.probed.drew:
            raise CannotApply(
                "its samples are not random: loader-workers has more workers, and is as exact"
            )
        return found

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        found = self.served(job)
        with started(found, 1, PREFETCH_FACTOR, exact=True, kind=ContinuingPool) as pools:
            yield pools
