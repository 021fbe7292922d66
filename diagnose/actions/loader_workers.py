"""Batches made by worker processes, more of them or fewer, from the next batch on."""

from __future__ import annotations

from diagnose.actions._loader_serving import LoaderServing
from diagnose.core.trial import Safety


class LoaderWorkers(LoaderServing):
    """Lets worker processes make the batches of the script's `DataLoader`, while the epoch goes on.

    ## What it does
    Forks worker processes that run torch's own worker loop over the script's dataset, and asks them for
    the batches that the script's sampler names next. The loader, its iterator and its sampler stay the
    script's: the order of samples is the same, none is lost or comes twice, and the random numbers of the
    training process are drawn at the moments at which they would have been. A loader that has workers
    already is served by as many as are best; its own ones idle meanwhile.

    ## When it takes effect
    With the next batch. On leaving, what the workers were asked for is handed out first.

    ## When it cannot help
    Where the CPUs are all busy: workers then take them from training. Where the wait is for something that
    only one process can have at a time.

    ## When it is refused
    Two batches are first made in a forked child, which the training process does not feel. Refused are:
    an `IterableDataset`; a dataset whose samples are random (see `loader-workers-reseeded`), that changes
    itself, or that reads through an open file; a sampler that draws from the process's generators for each
    batch; loaders that ask for `spawn`. On a GPU, workers are forked as torch itself forks them: the
    dataset must make its batches on the CPU.

    ## What watches it
    The first batch is made in the training process, too, and compared bit for bit. Each worker compares
    its random number generators before and after each batch. Should anything differ, or a worker die, hang
    or raise, the batch is made in the training process, and the workers are not asked again. A dataset
    whose attributes the script sets between epochs is given to new workers; one that it changes between
    two batches is read in the training process from then on.

    ## What is not seen
    Numbers drawn from generators that are none of the process's and no part of the dataset; elements of
    arrays that the script writes in place; files that a dataset writes.
    """

    safety = Safety.EXACT
    excludes = frozenset({"loader-workers-reseeded", "dataset-cache"})
