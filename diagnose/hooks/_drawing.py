"""When a loader's sampler draws random numbers: with the first batch, or, with workers, before it."""

from __future__ import annotations

from typing import Any

DRAW_NOTHING = ("SequentialSampler", "DistributedSampler")
"""Samplers of torch's that draw from none of the process's random numbers."""


def draws_with_first_batch(loader: Any) -> bool:
    """Whether the order of an epoch's samples is still to be drawn when it has begun."""
    sampler = type(getattr(loader, "sampler", None)).__name__
    return not getattr(loader, "num_workers", 0) and sampler not in DRAW_NOTHING


def random_state() -> int:
    """Returns a fingerprint of torch's random numbers, of which samplers draw."""
    from torch import default_generator

    return hash(default_generator.get_state().numpy().tobytes())
