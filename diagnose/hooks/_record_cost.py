"""What torch's profiler takes to record one event, tried where it runs."""

from __future__ import annotations

import sys
import threading
from time import perf_counter_ns
from typing import Any

EVENTS = 100
ROUNDS = 5
"""Under a millisecond, once, and only in a run that is being profiled. The middle round counts: in
one the thread may have lost its CPU. That it does in the steps, too, others tell."""


def record_ns() -> float | None:
    """Returns nanoseconds per event, on the calling thread; `None` while no profiler is on.

    The same operation runs here and in a thread of its own, which torch's profiler does not follow.
    """
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if not getattr(profiler, "_is_profiler_enabled", False):
        return None
    plain: list[float] = []
    apart = threading.Thread(target=lambda: plain.append(_operation_ns()), daemon=True)
    here = _operation_ns()
    apart.start()
    apart.join()
    return max(0.0, here - plain[0]) if plain else None


def _operation_ns() -> float:
    import torch

    rounds_ns = []
    with torch.no_grad():
        number = torch.ones(1)
        for _ in range(ROUNDS):
            begun = perf_counter_ns()
            for _ in range(EVENTS):
                number.neg_()
            rounds_ns.append((perf_counter_ns() - begun) / EVENTS)
    return sorted(rounds_ns)[ROUNDS // 2]
