"""Batches made by worker processes, more of them or fewer, from the next batch on."""

from __future__ import annotations

from diagnose.actions._loader_serving import ManyWorkers
from diagnose.core.trial import Safety


class LoaderWorkers(ManyWorkers):
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
    Batches are first made in forked children, which the training process does not feel. Refused are:
    an `IterableDataset`; a dataset whose samples are random (see `loader-workers-reseeded`), that changes
    itself or a global of the script's, that reads through an open file or asks over a connection of the
    training process's, or whose samples depend on the worker that makes them, by its number or its seed; a
    sampler that draws from the process's generators for each batch, that keeps its place in itself, or, if
    it is not torch's, that comes to no end of an epoch in half a second of drawing; loaders, and scripts,
    that ask for `spawn`. On a GPU, workers are forked as torch itself forks them: the dataset must make its
    batches on the CPU.

    ## What watches it
    The first batch, and one at the beginning of later epochs, is compared bit for bit: with one made in the
    training process, or, beside workers of the script's, with theirs. That takes 0.5 % of the time at most.
    Each worker compares its random number generators before and after each batch. Should anything differ,
    or a worker die, hang or raise, the script gets its own batch, and the workers are not asked again.

    What batches are made from is looked at when an epoch begins: attributes of the dataset and of
    `collate_fn` and all that they hold, elements of lists, bytes of NumPy's arrays, pandas' tables and
    `multiprocessing`'s values, globals that the script's functions read, attributes of its classes. If it
    has changed, new workers get it as it is now. Without workers of the script's, a change counts from the
    next batch on: names are looked at before each batch, everything before the first ones and then for 1 %
    of the time. Batches of a dataset that changes between two of them are made in the training process from
    then on.

    What cannot be seen to change, new workers get with each epoch: tables of more than a million elements
    or 32 MiB, of which evenly spaced ones are looked at, and what compiled objects hold that are of none of
    the packages numpy, pandas, pyarrow and torch, such as tables of polars', or stand for those of another
    process. Without workers of the script's, batches are then compared in the middle of an epoch, too.

    A sampler of the script's own is asked ahead only when it was seen for three batches that nobody else
    changes it, and for the last index of an epoch not at all. Once somebody does, it is not asked ahead any
    more.

    ## What is not seen
    What is written to a file, to mapped memory, or to a tensor's memory through NumPy; globals that only
    code of installed packages reads; the environment; of more than 2000 objects the innermost. Numbers
    drawn from generators that are none of the process's and no part of the dataset. Of a change deep in the
    dataset, or in what cannot be seen to change, that comes in the middle of a long epoch, the batches made
    by then. Of a sampler of the script's that the loop changes for the first time after it has been asked
    ahead, the two batches for each worker that were named by then.

    ## What is not written into the script
    `num_workers` where torch's own workers would do something else: they ask any sampler ahead, whatever
    the loop does to it, and begin an epoch of it twice; and they call a `worker_init_fn`, which nobody does
    without workers.
    """

    safety = Safety.EXACT
    excludes = frozenset({"loader-workers-reseeded", "dataset-cache"})
