"""More batches kept ready by the workers that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from diagnose.actions._loader_ahead import Depth
from diagnose.actions._loader_choice import (
    lacks_memory,
    not_like_torchs,
    obstacle,
    probed_once,
    sampler_objection,
)
from diagnose.actions._loader_probe import Probed
from diagnose.actions._loader_service import on_every_feed, put_on, shape
from diagnose.actions._loader_switch import feed_of, feeds
from diagnose.actions._memory import available_bytes
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

FACTORS = (4, 8)
"""Batches kept ready per worker, where torch's default is 2. What 8 do not bridge is no slow sample but too
few workers."""

MEMORY_SHARE = 0.1
"""Of the memory that is available, so much may be filled with batches that wait."""


class LoaderPrefetch(Action):
    """Asks the loader's workers for more batches ahead, so that a slow sample now and then is bridged.

    ## What it does
    Each worker of the script's, or of `loader-workers`, is asked for four or eight batches beforehand
    instead of two. Order, samples and random numbers stay the same: no index is drawn before it would have
    been if that moved a generator.

    ## When it takes effect
    With the next batch; the queue then fills while there is time.

    ## When it cannot help
    Where workers are too slow on average: a longer queue runs empty just as well. Without workers nothing
    is ready beforehand.

    ## When it is refused
    For a sampler that draws from the process's generators for each batch, or keeps its place in itself, or
    was not seen to its end. Where workers live for the whole run (`persistent_workers=True`) and a sample
    depends on what they have made before, as random ones do: after an epoch that is left early they have
    made more.

    ## What was measured
    That order, samples and random numbers stay the same, where it is not refused also in loops that leave
    their epochs early. What it wins depends on how far apart slow samples are: the tuner measures it in
    windows of 20 steps.

    ## Its price
    Memory for the batches that wait. A tenth of what is available is the limit.
    """

    safety = Safety.EXACT
    order = 20
    window_steps = 20

    def check(self, job: Job) -> None:
        if not self.values(job):
            raise CannotApply("twice as many batches kept ready would not fit into a tenth of the memory")

    def values(self, job: Job) -> Sequence[int | None]:
        served = _served(job)
        room = available_bytes() * MEMORY_SHARE
        fitting = []
        for factor in FACTORS:
            batches_ahead = [
                (batches, workers * factor) for batches, workers, now in served if now < factor
            ]
            needed = sum(probed_once(batches).batch_bytes * ahead for batches, ahead in batches_ahead)
            short = any(lacks_memory(probed_once(batches), ahead) for batches, ahead in batches_ahead)
            if batches_ahead and needed <= room and not short:
                fitting.append(factor)
        return fitting

    def largest(self, job: Job) -> int | None:
        return max((value for value in self.values(job) if value is not None), default=None)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        assert value is not None
        self.settle_steps = max(self.settle_steps, *(value * workers + 1 for _, workers, _ in _served(job)))
        yield value

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        depth = Depth(prepared)
        loaders = [ref(loader) for loader, _ in _loaders(job)]

        def begins(loader: Any, batches: Any) -> None:
            if any(loader is known() for known in loaders):
                feed = feed_of(batches)
                feed.put(depth)
                feed.started()

        def start() -> None:
            put_on((batches for _, batches in _loaders(job)), depth)

        with on_every_feed(job, start, begins, depth):
            yield

    def state(self, job: Job) -> Any:
        return shape(job)

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        if reason := not_like_torchs(job):
            return {"note": f"prefetch_factor={value} is not written into the script: {reason}"}
        return {"DataLoader.prefetch_factor": str(value)}


def _loaders(job: Job) -> list[tuple[Any, Any]]:
    """Returns the loaders that workers make batches for, and their iterators."""
    found = []
    reason = "no workers make the batches: there is nobody to ask for more"
    for loader, batches in zip(job.loaders, job.iterators, strict=True):
        served = any(known is batches and feed.active is not None for known, feed in feeds())
        if obstacle(loader, batches) or not (served or batches._num_workers):
            continue
        objection = _objection(loader, probed_once(batches))
        if objection:
            reason = objection
        else:
            found.append((loader, batches))
    if not found:
        raise CannotApply(reason)
    return found


def _objection(loader: Any, probed: Probed) -> str:
    if probed.error:
        return f"no batch could be made in a forked process: {probed.error}"
    remembers = probed.drew or probed.changed or not probed.repeatable
    if loader.persistent_workers and remembers:
        return (
            "samples depend on what their worker has made before, and workers live for the whole run: after"
            " an epoch that is left early they would have made more"
        )
    return sampler_objection(probed)


def _served(job: Job) -> list[tuple[Any, int, int]]:
    """Returns iterators, how many workers serve each, and what each worker is asked for beforehand."""
    active = dict(feeds())
    found = []
    for _, batches in _loaders(job):
        feed = active.get(batches)
        pool = feed.active if feed is not None else None
        num_workers = pool.num_workers if pool is not None else batches._num_workers
        factor = feed.factor if feed is not None else batches._prefetch_factor
        found.append((batches, num_workers, factor))
    return found
