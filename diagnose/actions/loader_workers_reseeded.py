"""Batches with random samples made by worker processes, each with random numbers of its own."""

from __future__ import annotations

from diagnose.actions._loader_serving import ManyWorkers
from diagnose.core.trial import Safety


class LoaderWorkersReseeded(ManyWorkers):
    """Does what `loader-workers` does, for a dataset with random samples: augmented images, masked text.

    ## What it does
    The same as `loader-workers`. The order of samples is the script's. The random numbers that a sample is
    made with are those of the worker that makes it, as they are wherever `num_workers` is not 0.

    ## Why it is not exact
    Without workers, samples and training draw from one stream of random numbers. With workers, samples are
    augmented in other ways, and what the script draws next, such as the order of the next epoch or a
    dropout mask, comes earlier in its stream. Training is as random as before, but not the same:
    `--allow training`.

    ## When it takes effect
    With the next batch, as `loader-workers` does.

    ## When it cannot help
    Where `loader-workers` cannot. It refuses what that refuses, save random samples, and compares none.

    ## What was measured
    Speed: what `loader-workers` says, for the mechanism is the same. Samples: the order is the script's,
    and no two samples have the same random numbers.
    """

    safety = Safety.TRAINING
    excludes = frozenset({"loader-workers", "dataset-cache"})
    reseeded = True
