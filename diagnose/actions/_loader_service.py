"""Workers of ours for the loaders of a job: begun, put in force, taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diagnose.actions._loader_choice import Source, lacks_memory, obstacle
from diagnose.actions._loader_pool import Pool, is_ending
from diagnose.actions._loader_switch import Part, feed_of, feeds
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.hooks._looks import added

COLLECT_S = 10.0
"""So long, at the end, a batch is waited for that workers were asked for; then it is made once more."""


@contextmanager
def started(
    found: list[Source], num_workers: int, prefetch_factor: int, *, exact: bool, kind: type[Pool] = Pool
) -> Iterator[list[Pool]]:
    """Starts workers for each loader, which idle until they are asked for something. On leaving, what they
    were asked for is taken from them, to be handed out in its turn, and they end.

    Args:
        found: The loaders; emptied.
        num_workers: How many workers for each.
        prefetch_factor: What each is asked for beforehand.
        exact: See `Pool`.
        kind: What is started.

    Raises:
        CannotApply: If there is no room for their batches.
    """
    pools: list[Pool] = []
    try:
        while found:
            # Nothing here may keep an iterator alive: the script's workers end with it.
            pools.append(_started(found.pop(), num_workers, prefetch_factor, exact, kind))
        yield pools
    finally:
        for pool in pools:
            _end(pool)


def _started(source: Source, num_workers: int, prefetch_factor: int, exact: bool, kind: type[Pool]) -> Pool:
    reason = lacks_memory(source.probed, num_workers * prefetch_factor)
    if reason:
        raise CannotApply(reason)
    return kind(
        source.loader,
        source.batches,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        exact=exact,
        batch_s=source.probed.batch_s,
    )


def _end(pool: Pool) -> None:
    try:
        for _, feed in feeds():
            feed.take_out(pool)
            if not is_ending():
                feed.collect(pool, COLLECT_S)
    finally:
        pool.workers.stop()


@contextmanager
def on_every_feed(
    job: Job, start: Callable[[], None], begins: Callable[[Any, Any], None], *parts: Part
) -> Iterator[None]:
    """Keeps something in force on the feeds of a job while open, whatever loops begin meanwhile.

    Args:
        start: Puts it in force on the loops that are under way; may refuse.
        begins: Likewise on one that begins, given its loader and iterator.
        parts: What these put in force.
    """
    try:
        start()
        with added(job.on_iterator, begins):
            yield
    finally:
        for _, feed in feeds():
            for part in parts:
                feed.take_out(part)


def put_on(iterators: Iterable[Any], part: Part) -> None:
    """Puts something in force on the feeds of some iterators."""
    for batches in iterators:
        feed_of(batches).put(part)


@contextmanager
def in_force(job: Job, pools: Sequence[Pool]) -> Iterator[None]:
    """Lets pools serve their loaders from the next batch on, in this epoch and in those that begin.

    Raises:
        CannotApply: If a pool has been found not to do what the script would have done itself.
    """
    for pool in [pool for pool in pools if not pool.is_over] or pools:
        if pool.broken:
            raise CannotApply(pool.broken)

    def begins(loader: Any, batches: Any) -> None:
        for pool in pools:
            if pool.fits(batches) and not pool.broken and not obstacle(loader, batches):
                feed = feed_of(batches)
                pool.refresh(loader, batches)
                feed.put(pool)
                feed.started()

    with on_every_feed(job, lambda: _use(job, pools), begins, *pools):
        yield


def _use(job: Job, pools: Sequence[Pool]) -> None:
    for loader, batches in zip(job.loaders, job.iterators, strict=True):
        for pool in pools:
            if pool.fits(batches) and not obstacle(loader, batches):
                feed_of(batches).put(pool)


def refusal(pools: Sequence[Pool]) -> str:
    """Returns why batches of a pool are not to be used any more; empty while those of all are."""
    return next((pool.refused for pool in pools if pool.refused), "")


def shape(job: Job) -> tuple[Any, ...]:
    """Returns what of ours has a part in the job's loaders, for `Action.state`.

    Batches that were asked for and are still to be handed out are none: they come from wherever they are
    made, and our methods take themselves out after the last.
    """
    known = dict(feeds())
    parts: list[Any] = []
    for batches in job.iterators:
        feed = known.get(batches)
        methods = tuple(name for name in ("_next_data", "_try_put_index") if name in vars(batches))
        if feed is None:
            parts.extend(methods)  # nobody would take them out
        elif feed.in_force or (methods and feed.is_idle):
            workers = feed.active.num_workers if feed.active is not None else None
            parts.append((type(batches).__name__, workers, feed.factor, len(feed.in_force), methods))
    return tuple(parts), len(job.on_iterator)
