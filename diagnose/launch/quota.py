"""What a control group, such as a container's, gives this process: a quota, and CPUs to be bound to."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def read(own: Path = OWN, mounted: Path = MOUNTED) -> Mapping[str, Any]:
    """Reads the nearest quota above this process.

    Returns:
        `quota`: CPUs that the group may use. `periods`, `throttled`: how many accounting periods there
        were, and in how many the group was stopped. `throttled_ns`: for how long, summed over CPUs.
        Empty where there is no quota.

    Raises:
        OSError: If the group's files cannot be read.
        ValueError: If they hold something else than expected.
    """
    found = group(own, mounted)
    if found is None:
        return {}
    folder, cpus = found
    stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
    in_us = "throttled_usec" in stat
    throttled = 1000 * int(stat["throttled_usec"]) if in_us else int(stat["throttled_time"])
    return {
        "quota": cpus,
        "periods": int(stat["nr_periods"]),
        "throttled": int(stat["nr_throttled"]),
        "throttled_ns": throttled,
    }


@functools.cache
def group(own: Path, mounted: Path) -> tuple[Path, float] | None:
    """Returns the folder of the group with the smallest quota at or above this process, and its CPUs."""
    quotas = [(folder, cpus) for folder in _folders(own, mounted) if (cpus := _quota(folder)) is not None]
    return min(quotas, key=lambda pair: pair[1], default=None)


def cpuset(own: Path = OWN, mounted: Path = MOUNTED) -> int | None:
    """Returns how many CPUs the group lets this process be bound to; `None` where nothing tells."""
    try:
        for folder in _folders(own, mounted, "cpuset"):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                if (folder / name).exists() and (cpus := (folder / name).read_text().strip()):
                    return _count(cpus)
    except (OSError, ValueError):
        pass
    return None


def _count(cpus: str) -> int:
    """Returns how many numbers a list such as `0-3,8` holds."""
    ends = [part.partition("-") for part in cpus.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _folders(own: Path, mounted: Path, controller: str = "cpu") -> list[Path]:
    """Returns the group of this process and those above it, in either version of the interface.

    In a container the path may be the host's: what is mounted is then the container's own group.
    """
    folders = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for name in [controller, controllers] if controllers else ["", "unified"]:
            root = mounted / name
            leaf = root / path.lstrip("/")
            if not leaf.is_dir():
                leaf = root
            while leaf != root.parent and leaf != leaf.parent:
                folders.append(leaf)
                leaf = leaf.parent
    return folders


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(limit) / int(period) if limit not in ("max", "-1") else None
    except (OSError, ValueError):
        return None
