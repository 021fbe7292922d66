"""Makes a few batches in a forked child, to learn what workers would do with the script's dataset.

Whatever the dataset does there, the training process is not touched by it.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from diagnose.actions._loader_purity import (
    file_positions,
    leaves,
    moved,
    random_states,
    same,
    signature,
)
from diagnose.actions.base import CannotApply
from diagnose.core.units import NS_PER_S

PATIENCE_S = 10.0
"""A child that has not made a few batches in this time hangs, or is too slow to be waited for."""

LOOK_AHEAD_S = 0.1
"""So long the sampler's next indices are drawn, to see whether that moves a generator of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a forked child found out about the batches of a loader.

    Attributes:
        error: Why no batch could be made; empty if one could.
        drew: Random number generators that making a batch moved.
        changed: Parts of the dataset that changed when a batch was made.
        repeatable: Whether the same indices gave the same batch twice.
        aliased: Whether the batch is the dataset's own memory, which the script might change in place.
        sampler_drew: Random number generators of the process that the sampler moved between two batches.
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
    aliased: bool = False
    sampler_drew: tuple[str, ...] = ()
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
    child = context.Process(target=_report, args=(batches, theirs), daemon=True)
    with quiet_fork():
        child.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise CannotApply(f"a forked process made no two batches in {PATIENCE_S:.0f} s")
        found = ours.recv()
        assert isinstance(found, Probed)
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
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _report(batches: Any, connection: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(silence, stream.fileno())  # what the dataset prints, it has not printed for the script
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
    from torch.utils.data._utils import worker as torch_worker
    from torch.utils.data.dataloader import _DatasetKind

    indices, sampler_drew = _look_ahead(batches)
    if not indices:
        return Probed(error="the sampler yields nothing")
    dataset = batches._dataset
    fetcher = _DatasetKind.create_fetcher(
        batches._dataset_kind, dataset, batches._auto_collation, batches._collate_fn, batches._drop_last
    )
    if batches._num_workers:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=0, num_workers=batches._num_workers, seed=batches._base_seed, dataset=dataset
        )
        if batches._worker_init_fn is not None:
            batches._worker_init_fn(0)
        fetcher.fetch(indices[0])  # handles that each worker opens when it begins
    states, parts = random_states(), signature(dataset)
    begun, cpu_begun = time.perf_counter(), _cpu_wanted_s()
    first = fetcher.fetch(indices[0])
    batch_s, cpu_s = time.perf_counter() - begun, _cpu_wanted_s() - cpu_begun
    again = fetcher.fetch(indices[0])
    if len(indices) > 1:
        fetcher.fetch(indices[1])
    drew = moved(states, random_states())
    changed = tuple(".".join(path) or "the dataset" for path in moved(parts, signature(dataset)))
    new = tuple(".".join(path) for path in signature(dataset).keys() - parts.keys())
    ForkingPickler.dumps(indices[0])
    ForkingPickler.dumps(first)
    tensors: list[torch.Tensor] = []
    twins: list[torch.Tensor] = []
    leaves(first, tensors.append)
    leaves(again, twins.append)
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return Probed(error="its batches are on the accelerator already")
    places = {tensor.data_ptr() for tensor in twins if tensor.numel()}
    return Probed(
        drew=drew,
        changed=changed + new,
        repeatable=same(first, again),
        aliased=any(tensor.data_ptr() in places for tensor in tensors if tensor.numel()),
        sampler_drew=sampler_drew,
        batch_s=batch_s,
        cpu_s=cpu_s,
        batch_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        samples=len(indices[0]) if batches._auto_collation and hasattr(indices[0], "__len__") else 1,
    )


def _cpu_wanted_s() -> float:
    """Returns the seconds that this process was on a CPU, or waited for one that others used."""
    waited_ns = 0
    with suppress(OSError, ValueError, IndexError):
        waited_ns = int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1])
    return time.process_time() + waited_ns / NS_PER_S


def _look_ahead(batches: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Draws from the child's copy of the sampler; returns indices and what generators that moved."""
    indices: list[Any] = []
    for sampling in (batches._sampler_iter, iter(batches._index_sampler)):
        states: dict[str, int] = {}
        until = time.perf_counter() + LOOK_AHEAD_S
        while time.perf_counter() < until:
            index = next(sampling, END)
            # Where the end is known beforehand, nobody draws beyond it before the loop does.
            watched = bool(states) and (index is not END or length(batches) is None)
            if watched and (drew := moved(states, random_states())):
                return indices, drew
            if index is END:
                break
            indices.append(index)
            states = random_states()  # not before the first draw, which may seed the epoch
        if len(indices) > 1:
            break
    return indices, ()


END = object()


def length(batches: Any) -> int | None:
    """Returns how many batches an epoch has, `None` if the sampler does not tell."""
    try:
        return len(batches._index_sampler)
    except (TypeError, NotImplementedError):
        return None
