"""Whether memory is what a job is short of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.hooks import _allocator

SHORT_SHARE = 0.10
"""Memory is short where less than this part is left at the peak. An allocator needs about as much to find
room for its largest blocks."""

STATM = Path("/proc/self/statm")

NEEDED = {"allocated_bytes", "peak_allocated_bytes", "reserved_bytes"}


def refuse_unless_short(job: Job) -> None:
    """Raises `CannotApply` while there is memory to spare: what saves it costs time, and wins nothing."""
    free = free_share(job)
    if free is None:
        raise CannotApply(f"how much memory of the {job.device} is left is not known")
    if free >= SHORT_SHARE:
        raise CannotApply(f"memory is not short: {free:.0%} is left at the peak, and saving it costs time")


def free_share(job: Job) -> float | None:
    """Returns the part of the device's memory that no step has needed yet; on a CPU what is free now."""
    if job.device == "cuda":
        peak = allocator_of(job)["peak_allocated_bytes"]
        return 1 - peak / _allowed_bytes(job)
    return _free_of_host() if job.device == "cpu" else None


def free_at_peak(job: Job) -> float:
    """Returns the bytes of the job's GPU that no step has needed yet: the driver's, and the allocator's."""
    told = allocator_of(job)
    cached = told["reserved_bytes"] - told["peak_allocated_bytes"]
    free = min(torch.cuda.mem_get_info(job.torch_device)[0], _allowed_bytes(job) - told["reserved_bytes"])
    return max(0.0, free) + max(0, cached)


def _allowed_bytes(job: Job) -> float:
    """All of the GPU's memory, or what the script has told its allocator to make do with."""
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(job.torch_device)
    return share * torch.cuda.mem_get_info(job.torch_device)[1]


def allocator_of(job: Job) -> Mapping[str, int]:
    """Returns what the allocator of the job's GPU says of the script, our own checks left out.

    Raises:
        CannotApply: If it is one that says nothing.
    """
    place = job.torch_device
    told = _allocator.read(torch.cuda.current_device() if place is None else place.index)
    if not told.keys() >= NEEDED:
        raise CannotApply("how much memory of the GPU is left is not known")
    return told


def _free_of_host() -> float | None:
    told = _host_bytes()
    return told["MemAvailable"] / told["MemTotal"] if "MemAvailable" in told else None


def available_bytes() -> int:
    """Returns the host's memory that can be had without swapping; 0 where the system does not tell."""
    return _host_bytes().get("MemAvailable", 0)


def _host_bytes() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def resident_bytes() -> int:
    """Returns the memory that the process occupies; 0 where the system does not tell."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
