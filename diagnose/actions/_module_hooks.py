"""Whether a block has hooks now: the script may register them while an action is in force, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def hooks_of(block: nn.Module, kinds: Iterable[str] = FORWARD + BACKWARD) -> list[dict[int, Any]]:
    """Returns the dictionaries that hold hooks of a block, of its parts and of all modules: `any` tells of
    them, in a microsecond, whether there is one now."""
    return [
        *(getattr(of_all, f"_global{kind}") for kind in kinds),
        *(vars(part).get(kind, {}) for part in block.modules() for kind in kinds),
    ]
