"""Whether memory is what a job is short of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.hooks import _allocator

SHORT_SHARE = 0.10
"""Memory is short where less than this part is left at the peak. An allocator needs about as much to find
room for its largest blocks."""

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
        return 1 - peak / torch.cuda.mem_get_info(job.torch_device)[1]
    return _free_of_host() if job.device == "cpu" else None


def free_at_peak(job: Job) -> float:
    """Returns the bytes of the job's GPU that no step has needed yet: the driver's, and the allocator's."""
    told = allocator_of(job)
    cached = told["reserved_bytes"] - told["peak_allocated_bytes"]
    return torch.cuda.mem_get_info(job.torch_device)[0] + max(0, cached)


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
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
