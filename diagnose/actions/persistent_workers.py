"""Worker processes kept from one epoch to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

from diagnose.actions._loader_choice import obstacle, probed_once
from diagnose.actions._loader_contents import MANY_BYTES
from diagnose.actions._loader_keep import (
    OF_WORKERS,
    Keeper,
    functions,
    keeper_of,
    keeping,
    makes_its_own,
)
from diagnose.actions._loader_parts import Watch
from diagnose.actions._loader_serving import PERSISTENT
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._looks import added

MAX_EPOCH_STEPS = 100
"""An epoch of more steps hides what its beginning costs: a comparison would take thousands of them."""


class PersistentWorkers(Action):
    """Keeps the workers of a loader that starts them anew in each epoch.

    ## What it does
    When the script begins the next epoch, its new iterator gets the processes of the last one, instead of
    starting others. Each is seeded as a new one would be, from the base seed that the iterator draws as
    always: order, samples, augmentation and the random numbers of the training process stay what they were.

    ## When it takes effect
    With the second epoch that begins after its trial has: what the workers of an earlier one were made
    from, nobody has seen.

    ## When it cannot help
    Where epochs are long: only their beginnings become shorter. In epochs of more than 100 steps no
    comparison could tell. Where the script makes a new `DataLoader` for each epoch.

    ## When it is refused
    Where the dataset changes itself: a new worker begins with it as the training process has it, a kept one
    as it has left it. Where a worker that is kept makes another batch, seeded anew, than a new one would: a
    dataset that seeds generators once in each worker, or has one that nobody sees. Where its samples are
    random and the script sets up its workers by a function of its own. Where batches are made from what
    cannot be seen to change (`loader-workers` says what that is): more than 256 MiB of arrays, tables of
    polars'. Where the script has changed what they are made from, new workers get it; an epoch that is
    begun while another one is under way gets new ones, too.
    """

    safety = Safety.EXACT
    order = 20

    def check(self, job: Job) -> None:
        _candidates(job)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        epochs = [len(batches) for _, batches in _candidates(job)]
        # So that there is a beginning in each window.
        self.window_steps = max(self.window_steps, *epochs)
        beginnings = Beginnings()
        with added(job.on_iterator, beginnings.begins):
            yield beginnings

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        keepers: list[Keeper] = []
        with keeping():
            try:
                _keep(job, keepers, prepared)
                yield
            finally:
                for keeper in keepers:
                    keeper.end()

    def state(self, job: Job) -> Any:
        kept = sum(keeper_of(loader) is not None for loader in job.loaders)
        return kept, sum("_shutdown_workers" in vars(batches) for batches in job.iterators)

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"note": PERSISTENT}


class Beginnings:
    """Knows what batches were made from when workers of the script's began."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[Callable[[], Any], Watch]] = WeakKeyDictionary()

    def begins(self, loader: Any, batches: Any) -> None:
        """An epoch begins."""
        if loader in self._known:
            watch = self._known[loader][1]
            if keeper_of(loader) is None:  # else it has looked
                watch.renew(**functions(loader))
        else:
            watch = _watch(loader)
        self._known[loader] = ref(batches), watch

    def keeper(self, loader: Any, batches: Any) -> Keeper:
        """Returns what keeps the workers of a loader from now on."""
        begun, watch = self._known.get(loader, (_nothing, None))
        if watch is None:
            watch = _watch(loader)
            self._known[loader] = _nothing, watch
        known = begun() is batches and not watch.has_changed(**functions(loader))
        return Keeper(loader, batches, watch, known=known)


def _nothing() -> None:
    """Stands for a reference to no iterator."""


def _watch(loader: Any) -> Watch:
    return Watch(loader.dataset, most_bytes=MANY_BYTES, **functions(loader))


def _keep(job: Job, keepers: list[Keeper], beginnings: Beginnings) -> None:
    for loader, batches in _candidates(job):
        keepers.append(beginnings.keeper(loader, batches))


def _candidates(job: Job) -> list[tuple[Any, Any]]:
    """Returns the loaders whose workers can be kept, and their iterators.

    Raises:
        CannotApply: If there is none; says why not.
    """
    found: dict[int, tuple[Any, Any]] = {}
    reasons = []
    for loader, batches in zip(reversed(job.loaders), reversed(job.iterators), strict=True):
        if id(loader) not in found:
            reason = _objection(loader, batches)
            if reason:
                reasons.append(reason)
            else:
                found[id(loader)] = loader, batches
    if not found:
        raise CannotApply(reasons[0] if reasons else "no DataLoader feeds the training loop")
    return list(found.values())


def _objection(loader: Any, batches: Any) -> str:
    if not getattr(batches, "_num_workers", 0):
        return "the loader has no workers"
    if getattr(loader, "persistent_workers", False):
        return "the loader keeps its workers already"
    if makes_its_own(loader):
        return "the loader makes its iterators in a way of its own"
    missing = [name for name in OF_WORKERS if name not in vars(batches) and not name.startswith("_pin")]
    if missing:
        return f"this torch's loader has no {missing[0]}"
    reason = obstacle(loader, batches)
    if reason:
        return reason
    if len(batches) > MAX_EPOCH_STEPS:
        return f"an epoch has {len(batches)} steps, and only its first is affected"
    unseen = _watch(loader).unseen
    if unseen:
        return f"nobody could see whether the script changes what its batches are made from: {unseen}"
    probed = probed_once(batches)
    if probed.error:
        return f"no batch could be made in a forked process: {probed.error}"
    if probed.changed:
        return f"making a batch changes the dataset itself: {', '.join(probed.changed[:3])}"
    if probed.drew and loader.worker_init_fn is not None:
        return "its samples are random, and the script sets up each new worker by a function of its own"
    if not (probed.renewable and (probed.repeatable or probed.drew)):
        return "a worker that is kept makes another batch, seeded anew, than a new one would"
    return ""
