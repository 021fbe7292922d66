"""Random numbers of the process: whether some were drawn, and when a loader's sampler draws its own: with
the first batch, or, with workers, before it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

DRAW_NOTHING = ("SequentialSampler", "DistributedSampler")
"""Samplers of torch's that draw from none of the process's random numbers."""

K = TypeVar("K")


def draws_with_first_batch(loader: Any) -> bool:
    """Whether the order of an epoch's samples is still to be drawn when it has begun."""
    sampler = type(getattr(loader, "sampler", None)).__name__
    return not getattr(loader, "num_workers", 0) and sampler not in DRAW_NOTHING


def random_state() -> int:
    """Returns a fingerprint of torch's random numbers, of which samplers draw."""
    from torch import default_generator

    return hash(default_generator.get_state().numpy().tobytes())


def random_states() -> dict[str, int]:
    """Returns a fingerprint of each of the process's global random number generators."""
    states = {"torch": random_state(), "random": hash(random.getstate())}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _, keys, *rest = numpy_random.get_state()
        states["numpy.random"] = hash((keys.tobytes(), *rest))
    return states


def moved(before: Mapping[K, Any], after: Mapping[K, Any]) -> tuple[K, ...]:
    """Returns the names whose values differ."""
    return tuple(name for name in after if before.get(name, after[name]) != after[name])
