"""How batches are loaded, by the training thread or by workers. `None` was not measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowBatch:
    """One of the batches that took a worker longest.

    Attributes:
        took_ns: Fetch and collate together.
        worker: The loader's number of the worker.
        before: How many batches the worker had made before: the first one also pays for its start.
        step: The step, from 0, that was under way when the batch was there; `None` where none was.
        num_samples: How many samples it holds; `None` where the loader does not batch them itself.
        samples: What was asked of the dataset, the first of them; empty for a stream.
    """

    took_ns: int
    worker: int
    before: int
    step: int | None = None
    num_samples: int | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a worker reads for a batch, from a disk or the page cache: the mean of those looked into.

    Attributes:
        opens: Files that its main thread opens, by way of Python.
        reads: System calls with which it reads; `None` when unknown.
        samples: Samples in the batch; `None` where nobody says.
        read_bytes: Bytes that its main thread reads, without what is mapped into memory; `None` when
            unknown.
        made_bytes: Bytes of the batch; `None` when unknown.
        share: Part of the workers' sampled time in lines of the script that read files or other stores, or
            work on them while they are open; `None` where samples are too few.
        asking_share: Likewise, in lines that do nothing but ask a data base or open an archive.
    """

    opens: float
    reads: float | None = None
    samples: float | None = None
    read_bytes: float | None = None
    made_bytes: float | None = None
    share: float | None = None
    asking_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What the DataLoader's worker processes did, all of them together.

    Attributes:
        num_workers: Number of distinct worker processes that reported.
        batches: Batches they produced.
        fetch_ns: Time in `dataset[...]` per batch, without collate.
        collate_ns: Time in `collate_fn` per batch.
        send_ns: CPU time per batch of everything but fetch and collate: pickling and queues, mostly. That
            of helper threads, too, where `helper_ns` is `None`.
        cpu_share: Part of fetch and collate that was spent on a CPU; the rest waited for disk, network or a
            free core.
        idle_share: Part of the workers' life spent waiting to be asked.
        ready_batches: Mean number of finished batches waiting when the loop asked for one.
        delay_share: Part of fetch and collate in which a worker was ready to run and had no CPU.
        median_ns: Median time of fetch and collate together, per batch.
        tail_share: Part of the workers' busy time that batches took beyond the median, counting those alone
            that took over twice of it.
        tail_batches: Part of the batches that took over twice the median.
        longest_ns: The longest batch.
        slowest: The longest batches, the longest first; empty where it was not kept what they held.
        busiest: Busy time of the busiest worker, as a multiple of the mean one's.
        pieces: Objects that the fullest batch looked into consists of, up to 1000; `None` when unknown.
        piped_bytes: Bytes of arrays and texts in the batch looked into that has most of them: those go
            through a pipe, and those of tensors through shared memory; `None` when unknown.
        private_growth_bytes: Memory that each worker came to own over its life, mean of those that lived
            long enough to tell: pages no longer shared with the training process.
        repeated: Watched samples that came out the same each time they were asked for again.
        varied: Watched samples that came out differently.
        at_once: Workers of one epoch, where each epoch starts its own; `None` when unknown.
        helper_ns: CPU time per batch of threads that compute beside a worker's main one and send nothing:
            teams of BLAS or OpenMP, decoders; `None` when unknown.
        reading: What they read; `None` when unknown.
        transform_share: Part of their sampled time, 0 to 1, in transforms of the samples, as code calls
            them; `None` where samples are too few.
    """

    num_workers: int
    batches: int
    fetch_ns: float
    collate_ns: float
    send_ns: float
    cpu_share: float
    idle_share: float
    ready_batches: float | None = None
    delay_share: float | None = None
    median_ns: float | None = None
    tail_share: float | None = None
    tail_batches: float | None = None
    longest_ns: float | None = None
    slowest: tuple[SlowBatch, ...] = ()
    busiest: float | None = None
    pieces: int | None = None
    piped_bytes: int | None = None
    private_growth_bytes: float | None = None
    repeated: int = 0
    varied: int = 0
    at_once: int | None = None
    helper_ns: float | None = None
    reading: Reading | None = None
    transform_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoading:
    """What the training thread does for a batch that it loads itself: the mean of those looked into.

    Attributes:
        samples: Samples in the batch; `None` where nobody says.
        reads: System calls with which it reads; `None` where the kernel does not tell.
        read_bytes: Bytes that these read, page cache included, without what is mapped into memory.
        made_bytes: Bytes of the batch; `None` when unknown.
        reading_share: Part of the sampled time of loading, 0 to 1, in lines that read files, or work on one
            while it is open; `None` where samples are too few.
        asking_share: Likewise, in lines that do nothing but ask a data base or open an archive.
        repeated: Watched samples that came out the same each time they were asked for again; none where
            making them draws from the process's random number generators.
        varied: Those that came out differently.
    """

    samples: float | None = None
    reads: float | None = None
    read_bytes: float | None = None
    made_bytes: float | None = None
    reading_share: float | None = None
    asking_share: float | None = None
    repeated: int = 0
    varied: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """Where loading a batch took its time, whoever loaded it.

    Attributes:
        fetch_ns: Time per batch in `dataset[...]` on the training thread; `None` when workers do it.
        collate_ns: Likewise in `collate_fn`.
        collate_cpu_share: Part of it, 0 to 1, that the training thread was on a CPU, or threads that it let
            collate; `None` where that is not known.
        own: What the training thread did for the batches that it loaded; `None` where it loaded none.
        workers: The worker processes of the loader that fed most steps, if there were any.
        batches_per_step: Training batches asked of loaders per step.
        loaders_per_step: Loaders that feed each step together: `zip(labelled, unlabelled)`.
        main_wait_share: Part of the waits for batches, 0 to 1, that is for those of them that have workers
            as the first has, or none as it; 1 where all are alike, or nobody looked.
        epoch_starts: Epochs that began within the measured steps.
        epoch_start_ns: Time per step (of all steps) that waits at the beginning of an epoch took beyond the
            usual wait.
        epoch_start_compute_ns: Likewise, what forward, backward and optimizer took beyond the usual in the
            steps that begin an epoch: after a fork, memory is copied when it is written first.
        epoch_start_gap_ns: Likewise, what the code between hooked calls took beyond the usual.
        steady_wait_ns: Mean wait of a step that begins no epoch.
        steady_gap_ns: Mean time of such a step between hooked calls, in the code of the loop itself.
        burst_ns: Part of `steady_wait_ns` above the usual wait, in steps that wait far longer than usual.
        burst_share: Part of the steps that do.
        burst_period: Steps between them, where they come regularly.
        early_wait_ns: Mean wait in the first quarter of the steps that begin no epoch.
        late_wait_ns: Likewise in the last quarter.
        early_read_bytes: Bytes read from storage per step in the first quarter of the run.
        late_read_bytes: Likewise in the last quarter.
        collected_share: Part of the garbage collector's time, 0 to 1, in which the loop waited for a batch:
            what unpacking or making one leaves for it.
        drawing_ns: Time per step in which the training thread draws what workers are to fetch next, without
            the beginnings of epochs; `None` when unknown.
        epoch_drawing_ns: Time per step (of all steps) that it takes at the beginnings of epochs.
        own_drawing_ns: Time per step in which the training thread draws what it is to fetch itself, without
            the first batch of each epoch; `None` when unknown.
        asked_aside: Whether another thread takes the batches from the loader, ahead of the loop, which
            waits for that one.
    """

    fetch_ns: float | None = None
    collate_ns: float | None = None
    collate_cpu_share: float | None = None
    own: OwnLoading | None = None
    workers: WorkerStats | None = None
    loaders_per_step: int = 1
    main_wait_share: float = 1.0
    batches_per_step: float | None = None
    epoch_starts: int = 0
    epoch_start_ns: float | None = None
    epoch_start_compute_ns: float | None = None
    epoch_start_gap_ns: float | None = None
    steady_wait_ns: float | None = None
    steady_gap_ns: float | None = None
    burst_ns: float | None = None
    burst_share: float | None = None
    burst_period: int | None = None
    early_wait_ns: float | None = None
    late_wait_ns: float | None = None
    early_read_bytes: float | None = None
    late_read_bytes: float | None = None
    collected_share: float | None = None
    drawing_ns: float | None = None
    epoch_drawing_ns: float | None = None
    own_drawing_ns: float | None = None
    asked_aside: bool = False
