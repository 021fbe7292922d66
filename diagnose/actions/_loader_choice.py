"""Which loaders of the job workers of ours can serve, and how many workers are worth a try."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _DatasetKind

from diagnose.actions._loader_probe import Probed, probe
from diagnose.actions._loader_purity import generators, unsharable
from diagnose.actions._loader_sampler import not_torchs
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.units import format_bytes

PRIVATE = (
    "_auto_collation",
    "_collate_fn",
    "_dataset",
    "_dataset_kind",
    "_drop_last",
    "_index_sampler",
    "_next_data",
    "_next_index",
    "_num_workers",
    "_num_yielded",
    "_pin_memory",
    "_sampler_iter",
)
PRIVATE_OF_WORKERS = ("_prefetch_factor", "_rcvd_idx", "_send_idx", "_try_put_index")
"""Names of torch's iterators that are relied on."""

PREFETCH_FACTOR = 2
"""torch's own default."""

WAITS = 0.5
"""A batch that takes less than this part of its time from the CPU waits for something else: more workers
than cores can be worth it."""

WAITERS_PER_CORE = 4
MAX_WORKERS = 16
"""Nobody is surprised by so many processes."""

NUM_TRIED = 3

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A loader that feeds training, and its iterator."""

    loader: Any
    batches: Any
    probed: Probed


def sources(job: Job, *, reseeded: bool = False) -> list[Source]:
    """Returns the loaders that workers of ours can serve.

    Args:
        reseeded: Whether samples may be made with other random numbers than the script's own.

    Raises:
        CannotApply: If there is none; says why not.
    """
    found: list[Source] = []
    reasons: list[str] = []
    seen: set[int] = set()
    for loader, batches in zip(reversed(job.loaders), reversed(job.iterators), strict=True):
        if id(batches._dataset) in seen:
            continue  # made anew for an epoch, or iterated over twice at once
        seen.add(id(batches._dataset))
        reason = obstacle(loader, batches)
        if not reason:
            probed = probed_once(batches)
            reason = objection(probed, reseeded=reseeded)
            if not reason:
                found.append(Source(loader=loader, batches=batches, probed=probed))
        if reason:
            reasons.append(reason)
    if not found:
        raise CannotApply(reasons[0] if reasons else "no DataLoader feeds the training loop")
    return found


def obstacle(loader: Any, batches: Any) -> str:
    """Returns why workers cannot serve an iterator, as far as can be told by looking; empty if they can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this system cannot fork a process"
    if multiprocessing.current_process().daemon:
        return "a daemonic process may have no children"
    needed = PRIVATE + (PRIVATE_OF_WORKERS if getattr(batches, "_num_workers", 0) else ())
    missing = [name for name in needed if not hasattr(batches, name)]
    if missing:
        return f"this torch's loader has no {missing[0]}"
    if type(batches).__module__ != "torch.utils.data.dataloader":
        return f"the loader's iterator is not torch's but a {type(batches).__qualname__}"
    if isinstance(batches._dataset, IterDataPipe | MapDataPipe):
        return "a DataPipe divides its samples among workers by itself"
    if batches._dataset_kind != _DatasetKind.Map:
        return "an IterableDataset yields its samples again in each worker, or in another order"
    if batches._num_workers and not getattr(batches, "_in_order", True):
        return "the loader hands batches out in any order (in_order=False)"
    context = getattr(loader, "multiprocessing_context", None)
    method = start_method() if context is None else context.get_start_method()
    # torch's workers are started by the default where nobody has chosen.
    if method != "fork" and (context is not None or method != default_start_method()):
        return f"the script asks for workers that are started by {method}, not forked"
    handle = unsharable(batches._dataset)
    if handle:
        return f"the dataset holds a {handle}, which forked processes must not share"
    return ""


def start_method() -> str:
    """Returns how torch starts workers where their loader does not say; fixes nothing that is open yet."""
    return multiprocessing.get_start_method(allow_none=True) or default_start_method()


def default_start_method() -> str:
    """Returns how processes are started here where nobody has chosen."""
    return multiprocessing.get_all_start_methods()[0]


_probed: WeakKeyDictionary[Any, Probed] = WeakKeyDictionary()


def probed_once(batches: Any) -> Probed:
    """Returns what a forked child found out about an iterator's batches; asks only once.

    Raises:
        CannotApply: If the child died or hung.
    """
    found = _probed.get(batches)
    if found is None:
        found = _probed[batches] = probe(batches)
    return found


def objection(probed: Probed, *, reseeded: bool) -> str:
    """Returns why batches would not be the same if workers made them; empty if they would."""
    if probed.error:
        return f"no batch could be made in a forked process: {probed.error}"
    if probed.files:
        return f"the dataset reads a file that stays open, which workers would share: {probed.files[0]}"
    if reason := sampler_objection(probed):
        return reason
    if probed.changed:
        return f"making a batch changes the dataset itself: {', '.join(probed.changed[:3])}"
    if probed.aliased:
        return "its batches hold the dataset's own memory: what the loop writes there would be lost"
    if reseeded:
        return ""
    if probed.drew:
        return (
            f"its samples are random ({', '.join(probed.drew)}), and would be others:"
            " loader-workers-reseeded does that, with --allow training"
        )
    if not probed.repeatable:
        return "the same indices gave two different batches"
    if not probed.alike:
        return "another worker, or none, makes another batch of the same indices"
    return ""


def sampler_objection(probed: Probed) -> str:
    """Returns why the sampler must not be asked ahead of the loop; empty if it may."""
    if probed.sampler_drew:
        return (
            f"the sampler draws from the process's random numbers ({', '.join(probed.sampler_drew)}) for"
            " each batch: asking it ahead would change the others"
        )
    if probed.sampler_goes_on:
        return (
            "the sampler came to no end of an epoch when it was followed: it may draw from the process's"
            " random numbers later on, and asking it ahead would change the others"
        )
    if probed.sampler_changed:
        return (
            f"the sampler keeps its place in itself ({', '.join(probed.sampler_changed[:3])}): a loop that"
            " leaves an epoch early would find it moved on"
        )
    return ""


def not_like_torchs(job: Job) -> str:
    """Returns why torch's own workers, which the script itself would ask for, do something else than is
    done here; empty if they do the same. Here a sampler is watched while it is asked ahead: see `Order`."""
    for loader, batches in zip(job.loaders, job.iterators, strict=True):
        sampler = getattr(batches, "_index_sampler", None)
        own = not_torchs(sampler)
        if own is not None or generators(sampler):
            name = type(sampler if own is None else own).__name__
            return (
                f"torch's workers ask the sampler ({name}) ahead whatever the loop does to it meanwhile,"
                " and begin to iterate over it twice"
            )
        if getattr(batches, "_num_workers", 0):
            continue
        if getattr(loader, "worker_init_fn", None) is not None:
            return "its worker_init_fn, which nobody calls without workers, would be called"
        if not getattr(loader, "in_order", True):
            return "with workers, in_order=False lets batches come in any order"
        if job.facts.get("drawn_before_batch"):
            return (
                "the loop draws random numbers between iter() of its loader and the first batch; with"
                " workers the sampler draws before that"
            )
    return ""


def cores(job: Job) -> int:
    """Returns the CPUs that this process has to itself, the training thread's included."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = job.facts.get("quota_cpus")
    if isinstance(quota, int | float) and quota > 0:
        own = min(own, round(quota) or 1)
    return max(1, own // max(1, job.local_ranks))


def most_workers(job: Job, source: Source) -> int:
    """Returns the largest number of workers that makes sense here."""
    own = cores(job)
    return min(MAX_WORKERS, own * WAITERS_PER_CORE if waiting(source.probed) else own)


def counts(job: Job, source: Source) -> Sequence[int]:
    """Returns the numbers of workers to try, in ascending order."""
    most = most_workers(job, source)
    now = source.batches._num_workers
    ladder = sorted({1, 2, *(most >> shift for shift in range(4)), *([now // 2, now * 2] if now else [])})
    possible = [count for count in ladder if 0 < count <= most and count != now]
    if len(possible) > NUM_TRIED:
        # The extremes and what lies between.
        possible = [possible[0], possible[len(possible) // 2], possible[-1]]
    return possible


def waiting(probed: Probed) -> bool:
    """Whether a batch waits for something else than a CPU for most of its time."""
    return probed.batch_s > 0 and probed.cpu_s < WAITS * probed.batch_s


def lacks_memory(probed: Probed, num_batches: int) -> str:
    """Returns why so many batches cannot be kept ready; empty if they can."""
    needed = probed.batch_bytes * num_batches
    try:
        stats = os.statvfs(SHARED_MEMORY)
    except OSError:
        return ""
    free = stats.f_bavail * stats.f_frsize
    if needed <= free:
        return ""
    return (
        f"{num_batches} batches ahead need {format_bytes(needed)} of shared memory; {SHARED_MEMORY} has"
        f" {format_bytes(free)}"
    )
