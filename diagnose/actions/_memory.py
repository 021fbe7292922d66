"""Whether memory is what a job is short of."""

from __future__ import annotations

from pathlib import Path

import torch

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job

SHORT_SHARE = 0.10
"""Memory is short where less than this part is left at the peak. An allocator needs about as much to find
room for its largest blocks."""


def refuse_unless_short(job: Job) -> None:
    """Raises `CannotApply` while there is memory to spare: what saves it costs time, and wins nothing."""
    free = free_share(job)
    if free is None:
        raise CannotApply(f"how much memory of the {job.device} is left is not known")
    if free >= SHORT_SHARE:
        raise CannotApply(f"memory is not short: {free:.0%} is left at the peak, and saving it costs time")


def free_share(job: Job) -> float | None:
    """Returns the part of the device's memory that no step has needed yet; on a CPU what is free now."""
    device = torch.device(job.device)
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        return 1 - torch.cuda.max_memory_allocated(device) / total
    return _free_of_host() if device.type == "cpu" else None


def _free_of_host() -> float | None:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
