"""What torch's allocator of device memory says of itself. Nothing here initialises CUDA, or resets it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

EVENTS = {"retries": "num_alloc_retries", "ooms": "num_ooms"}

LEVELS = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")

_lock = Lock()

_meanwhile: dict[int, Mapping[str, int]] = {}
"""By device: what is told while something of ours is at work."""

_ours: defaultdict[int, dict[str, int]] = defaultdict(dict)
"""By device: events that were ours."""

_peaks: defaultdict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
"""By device: a peak that is ours, and what it was before."""


def read(index: int) -> Mapping[str, int]:
    """Reads the statistics of one CUDA device's allocator, without what is `uncounted`.

    Any thread may: torch takes the allocator's lock and copies numbers, and asks nothing of the device.
    That lock is held while the allocator waits for the driver, and so long does this take.

    Returns:
        Of `allocated_bytes`, `reserved_bytes` and `inactive_split_bytes`: what they are, and as `peak_*`
        the most they were since the script last reset them. `retries`, `ooms`: how often. Empty where CUDA
        is not initialised; another allocator tells less.
    """
    with _lock:
        return _meanwhile.get(index) or _without_ours(index, _read(index))


@contextmanager
def uncounted() -> Iterator[None]:
    """What is done inside is ours, no need of the script's: its peaks, retries and lacks of memory are left
    out of what `read` tells. A peak is, as long as the script's own do not go beyond it."""
    torch: Any = sys.modules.get("torch")
    if _meanwhile or torch is None or not torch.cuda.is_initialized():
        yield
        return
    with _lock:
        begun = {index: _read(index) for index in range(torch.cuda.device_count())}
        _meanwhile.update({index: _without_ours(index, told) for index, told in begun.items()})
    try:
        yield
    finally:
        with _lock:
            for index, before in begun.items():
                _note(index, before, _read(index))
            _meanwhile.clear()


def _note(index: int, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    more = {name: number - before[name] for name, number in after.items() if name in before}
    for name in EVENTS:
        _ours[index][name] = _ours[index].get(name, 0) + max(0, more.get(name, 0))
    for name in (f"peak_{level}" for level in LEVELS):
        if more.get(name, 0) > 0:
            _peaks[index][name] = after[name], _meanwhile[index][name]


def _without_ours(index: int, told: Mapping[str, int]) -> Mapping[str, int]:
    found = {name: max(0, number - _ours[index].get(name, 0)) for name, number in told.items()}
    for name, (peak, before) in _peaks[index].items():
        if found.get(name) == peak:
            found[name] = max(before, found[name.removeprefix("peak_")])
    return found


def _read(index: int) -> Mapping[str, int]:
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
