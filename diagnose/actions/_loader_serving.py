"""What the actions have in common that let workers of ours make the batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from diagnose.actions._loader_choice import (
    PREFETCH_FACTOR,
    Source,
    cores,
    counts,
    most_workers,
    not_like_torchs,
    sources,
    start_method,
    waiting,
)
from diagnose.actions._loader_service import in_force, refusal, shape, started
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job

PERSISTENT = (
    "persistent_workers=True spares the workers' start in each epoch, but from the second one on samples"
    " are shuffled otherwise than before, and what the script changes in the dataset does not reach them"
)
"""Of torch's own: it draws no seed for them in an epoch, and forks once. What is in force here does."""


BURSTS = 3
"""Workers that began together deliver together: a window holds so many of their bursts, so that none of
them looks like a pause."""


class LoaderServing(Action):
    """Lets worker processes make the batches."""

    order = 20

    def served(self, job: Job) -> list[Source]:
        """Returns the loaders that it is for.

        Raises:
            CannotApply: If there is none; says why not.
        """
        raise NotImplementedError

    def check(self, job: Job) -> None:
        found = self.served(job)
        if cores(job) < 2 and not any(waiting(source.probed) for source in found):
            raise CannotApply("there is one CPU: a worker would take it from training")

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        return in_force(job, prepared)

    def why_not_stay(self, prepared: Any) -> str:
        return refusal(prepared)

    def state(self, job: Job) -> Any:
        return shape(job)


class ManyWorkers(LoaderServing):
    """Likewise; the value is their number.

    Attributes:
        reseeded: Whether samples may be made with other random numbers than the script's own.
    """

    reseeded: ClassVar[bool] = False

    def served(self, job: Job) -> list[Source]:
        return sources(job, reseeded=self.reseeded)

    def values(self, job: Job) -> Sequence[int | None]:
        return counts(job, self.served(job)[0])

    def largest(self, job: Job) -> int | None:
        return most_workers(job, self.served(job)[0])

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        num_workers = value or cores(job)
        found = self.served(job)
        # Batches are compared with those of the script's own workers, which are asked for some already.
        own = [
            (source.batches._num_workers, getattr(source.batches, "_prefetch_factor", 0))
            for source in found
        ]
        own_ahead = max(number * factor if number else 0 for number, factor in own)
        self.settle_steps = max(self.settle_steps, num_workers * PREFETCH_FACTOR + 1, 2 * own_ahead + 1)
        most_workers = max(num_workers, *(number for number, _ in own))
        self.window_steps = max(self.window_steps, BURSTS * most_workers)
        with started(found, num_workers, PREFETCH_FACTOR, exact=not self.reseeded) as pools:
            yield pools

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        if reason := not_like_torchs(job):
            return {"note": f"num_workers={value} is not written into the script: {reason}"}
        settings = {"DataLoader.num_workers": str(value), "note": PERSISTENT}
        if start_method() != "fork":
            settings["DataLoader.multiprocessing_context"] = '"fork"'
        return settings
