"""What torch's allocator of device memory says of itself. Nothing here initialises CUDA, or resets it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

EVENTS = {"retries": "num_alloc_retries", "ooms": "num_ooms"}

LEVELS = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")


def read(index: int) -> Mapping[str, int]:
    """Reads the statistics of one CUDA device's allocator.

    Any thread may: torch takes the allocator's lock and copies numbers, and asks nothing of the device.
    That lock is held while the allocator waits for the driver, and so long does this take.

    Returns:
        Of `allocated_bytes`, `reserved_bytes` and `inactive_split_bytes`: what they are, and as `peak_*`
        the most they were since the script last reset them. `retries`, `ooms`: how often. Empty where CUDA
        is not initialised; another allocator tells less.
    """
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return {}
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(index)
    except RuntimeError:
        return {}  # an allocator of the script's own, which keeps no statistics
    found = {name: stats.get(key) for name, key in EVENTS.items()}
    for name in LEVELS:
        kinds = stats.get(name, {}).get("all", {})
        found[name], found[f"peak_{name}"] = kinds.get("current"), kinds.get("peak")
    return {name: int(number) for name, number in found.items() if number is not None}
