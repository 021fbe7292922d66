"""Makes a few batches in a forked child, to learn what workers would do with the script's dataset.

Whatever the dataset does there, the training process is not touched by it.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _DatasetKind

from diagnose.actions._loader_parts import signature
from diagnose.actions._loader_purity import (
    file_positions,
    leaves,
    open_sockets,
    overlap,
    same,
    silence,
)
from diagnose.actions._loader_sampler import followed, look_ahead, not_torchs
from diagnose.actions.base import CannotApply
from diagnose.core.units import NS_PER_S
from diagnose.hooks._drawing import moved, random_states

PATIENCE_S = 10.0
"""A child that has not made a few batches in this time hangs, or is too slow to be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a forked child found out about the batches of a loader.

    Attributes:
        error: Why no batch could be made; empty if one could.
        drew: Random number generators that making a batch moved.
        changed: Parts of the dataset that changed when a batch was made.
        repeatable: Whether the same indices gave the same batch twice.
        alike: Whether a worker with another number and seed made the same batch.
        aliased: Whether the batch holds memory or objects of the dataset's, which the loop might change.
        sampler_drew: Random number generators of the process that the sampler moved between two batches.
        sampler_changed: Parts of the sampler that changed between two batches.
        sampler_goes_on: Whether a sampler that is not torch's was not followed to the end of an epoch.
        renewable: Whether a worker that is seeded anew makes what a new one does, and leaves the same
            random numbers to be drawn.
        files: Open files whose position moved.
        batch_s: Wall time to make a batch.
        cpu_s: Time for which a CPU was used or wanted to make it.
        batch_bytes: Size of its tensors.
        samples: Samples of it, where the indices tell.
    """

    error: str = ""
    drew: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    repeatable: bool = True
    alike: bool = True
    aliased: bool = False
    sampler_drew: tuple[str, ...] = ()
    sampler_changed: tuple[str, ...] = ()
    sampler_goes_on: bool = False
    renewable: bool = True
    files: tuple[str, ...] = ()
    batch_s: float = 0.0
    cpu_s: float = 0.0
    batch_bytes: int = 0
    samples: int = 0


def probe(batches: Any) -> Probed:
    """Makes two batches of an iterator's epoch in a child, each twice, and says what happened.

    Args:
        batches: The script's iterator. Its sampler is not advanced.

    Raises:
        CannotApply: If the child died or hung.
    """
    context = torch.multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(batches, theirs, open_sockets()), daemon=True)
    with quiet_fork():
        child.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise CannotApply(f"a forked process made no two batches in {PATIENCE_S:.0f} s")
        found = ours.recv()
        assert isinstance(found, Probed)
        if not (found.error or found.sampler_drew or found.sampler_changed or found.sampler_goes_on):
            followed.add(type(not_torchs(batches._index_sampler)))
        return found
    except EOFError:
        child.join(PATIENCE_S)
        raise CannotApply(
            f"a forked process that made a batch ended with exit code {child.exitcode}"
        ) from None
    finally:
        ours.close()
        if child.is_alive():
            child.join(1)
        if child.is_alive():
            child.kill()
            child.join()


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Lets processes be forked without the warning of Python 3.12 about threads, as `DataLoader` would for
    a script that asks for workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _report(batches: Any, connection: Connection, sockets: dict[int, int]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())  # what the dataset prints, it has not printed for the script
    silence(sockets)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    before = file_positions()
    try:
        found = _look(batches)
    except Exception as error:  # noqa: BLE001 (the dataset's own code; told in words)
        found = Probed(error=f"{type(error).__name__}: {error}")
    after = file_positions()
    shared = [path for each, (path, at) in after.items() if before.get(each, (path, at)) != (path, at)]
    for descriptor, (_, at) in before.items():
        with suppress(OSError):
            os.lseek(descriptor, at, io.SEEK_SET)  # it is the training process's position, too
    connection.send(replace(found, files=tuple(shared)))
    connection.close()


def _look(batches: Any) -> Probed:
    ahead = look_ahead(batches)
    indices = ahead.first
    if not indices:
        return Probed(error="the sampler yields nothing")
    dataset, collate_fn, fetcher = batches._dataset, batches._collate_fn, fetcher_of(batches)
    try:
        other, _ = _made_by_another(batches, fetcher, indices[0])
        renewable = not batches._num_workers or _is_renewable(batches, fetcher, indices[0])
    except WorkerFailed as error:
        return Probed(error=str(error))
    if batches._num_workers:
        _become_worker(batches, 0, batches._num_workers)
        fetcher.fetch(indices[0])  # handles that each worker opens when it begins
    states, parts = random_states(), signature(dataset, collate_fn=collate_fn)
    begun, cpu_begun = time.perf_counter(), _cpu_wanted_s()
    first = fetcher.fetch(indices[0])
    batch_s, cpu_s = time.perf_counter() - begun, _cpu_wanted_s() - cpu_begun
    again = fetcher.fetch(indices[0])
    if len(indices) > 1:
        fetcher.fetch(indices[1])
    drew = moved(states, random_states())
    parts_now = signature(dataset, collate_fn=collate_fn)
    changed = tuple(".".join(path) or "the dataset" for path in moved(parts, parts_now))
    new = tuple(".".join(path) for path in parts_now.keys() - parts.keys())
    tensors, twins = list(leaves(first)), list(leaves(again))
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return Probed(error="its batches are on the accelerator already")
    # A worker sends copies, save of storages that its dataset holds: those are shared from then on.
    aliased = not batches._num_workers and overlap(first, again, other)
    ForkingPickler.dumps(indices[0])
    ForkingPickler.dumps(first)
    aliased = aliased or overlap(tensors, twins, None)
    return Probed(
        drew=drew,
        changed=changed + new,
        repeatable=same(first, again),
        alike=same(first, other),
        aliased=aliased,
        sampler_drew=ahead.drew,
        sampler_changed=ahead.changed,
        sampler_goes_on=ahead.goes_on,
        renewable=renewable,
        batch_s=batch_s,
        cpu_s=cpu_s,
        batch_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        samples=len(indices[0]) if batches._auto_collation and hasattr(indices[0], "__len__") else 1,
    )


def fetcher_of(batches: Any) -> Any:
    """Returns what makes the batches of an iterator in this process, made anew."""
    return _DatasetKind.create_fetcher(
        batches._dataset_kind,
        batches._dataset,
        batches._auto_collation,
        batches._collate_fn,
        batches._drop_last,
    )


def _become_worker(batches: Any, number: int, num_workers: int, base_seed: int | None = None) -> None:
    """Lets this process pass for a worker, as torch sets one up."""
    base_seed = batches._base_seed if base_seed is None else base_seed
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=base_seed + number, dataset=batches._dataset
    )
    _seed(base_seed, number)
    if batches._num_workers and batches._worker_init_fn is not None:
        batches._worker_init_fn(number)


def reseed_worker(base_seed: int) -> None:
    """Seeds this worker's random number generators as torch does in a new one."""
    info = torch_worker.get_worker_info()
    assert info is not None
    object.__setattr__(info, "seed", base_seed + info.id)  # it is frozen
    _seed(base_seed, info.id)


def _seed(base_seed: int, number: int) -> None:
    random.seed(base_seed + number)
    torch.manual_seed(base_seed + number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(torch_worker._generate_state(base_seed, number))


class WorkerFailed(Exception):
    """A process that passes for a worker has made no batch; the message says why."""


def _made_by_another(
    batches: Any, fetcher: Any, index: Any, *, base_seed: int | None = None, then: int | None = None
) -> tuple[Any, dict[str, int]]:
    """Returns the batch that a worker makes which the script does not have, one more than there are, and
    the fingerprints of its random number generators.

    It is a process of its own, because what a worker opens when it begins cannot be opened twice in one.

    Args:
        fetcher: What makes its batches.
        index: Of the batch.
        base_seed: That it begins with; by default the script's.
        then: With which it is seeded anew, and makes the batch a second time.

    Raises:
        WorkerFailed: If it makes none.
    """
    reading, writing = os.pipe()
    with quiet_fork():
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)  # nobody else would end it
        try:
            _become_worker(batches, batches._num_workers, batches._num_workers + 1, base_seed)
            made = fetcher.fetch(index)
            if then is not None:
                reseed_worker(then)
                made = fetcher.fetch(index)
            sent = pickle.dumps(("", pickle.dumps((made, random_states()))))
        except Exception as error:  # noqa: BLE001 (the dataset's own code; told in words)
            sent = pickle.dumps((f"{type(error).__name__}: {error}", b""))
        with open(writing, "wb") as pipe:
            pipe.write(sent)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        sent = pipe.read()
    _, status = os.waitpid(child, 0)
    if not sent:
        raise WorkerFailed(f"a worker ended with exit code {os.waitstatus_to_exitcode(status)}")
    why_not, made = pickle.loads(sent)  # noqa: S301 (what our own child has sent)
    if why_not:
        raise WorkerFailed(why_not)
    found: tuple[Any, dict[str, int]] = pickle.loads(made)  # noqa: S301
    return found


def _is_renewable(batches: Any, fetcher: Any, index: Any) -> bool:
    """Whether a worker that is seeded anew makes the batch that a new one makes, and leaves the same random
    numbers to be drawn: that these are others need not show in this batch."""
    anew = batches._base_seed ^ 1
    kept, kept_states = _made_by_another(batches, fetcher, index, then=anew)
    new, new_states = _made_by_another(batches, fetcher, index, base_seed=anew)
    return same(kept, new) and kept_states == new_states


def _cpu_wanted_s() -> float:
    """Returns the seconds that this process was on a CPU, or waited for one that others used."""
    waited_ns = 0
    with suppress(OSError, ValueError, IndexError):
        waited_ns = int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1])
    return time.process_time() + waited_ns / NS_PER_S
