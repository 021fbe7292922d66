"""What rounding by chance depends on, beside the element: its parameter, and how many steps that has taken.

Replicas of a model have to round alike or they drift apart, and a step must not throw the dice of the one
before. So nothing here is a rank's own, as `torch.initial_seed` is in scripts that seed each rank
differently, and nothing begins anew when a table does. Steps are those in the optimizer's state where it
counts them: then a checkpoint goes on with the same dice. Others are kept here while the optimizer lives.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from diagnose.kernels._shards import shard_number
from torch.optim import Optimizer

_GOLDEN = 2654435769
"""2^32 by the golden ratio: its multiples stay far apart, so no shard throws another parameter's dice."""

_STEPS_TAKEN: WeakKeyDictionary[Optimizer, dict[int, float]] = WeakKeyDictionary()


def dice_of(index: int, param: torch.Tensor) -> int:
    """What `Row.dice` is for the parameter at a place among all of its optimizer. Another number for each
    shard: their elements are numbered alike."""
    return (index + shard_number(param) * _GOLDEN) % 2**32


def steps_taken(optimizer: Optimizer) -> dict[int, float]:
    """Steps of an optimizer whose state does not count them, by the place of the parameter, as they were
    when its table was last given up."""
    return _STEPS_TAKEN.setdefault(optimizer, {})
