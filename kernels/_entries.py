"""Whether an optimizer's state still holds what it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from operator import is_
from typing import Any

import torch


class Entries:
    """The entries of some parameters, told by going along the state: a look-up of each would hash tensors,
    which is a call in Python and costs three times as much.

    Args:
        state: The optimizer's.
        params: Keys of it.
    """

    def __init__(self, state: Mapping[Any, Any], params: Iterable[torch.Tensor]) -> None:
        ours = set(map(id, params))
        self._state = state
        self._are_ours = [id(key) in ours for key in state]
        self._keys = list(compress(state, self._are_ours))
        self._values = list(compress(state.values(), self._are_ours))

    def are_in(self, state: Mapping[Any, Any]) -> bool:
        """Whether it is this state, with these very objects in place. Others may have come behind them."""
        return (
            state is self._state
            and len(state) >= len(self._are_ours)
            and all(map(is_, compress(state, self._are_ours), self._keys))
            and all(map(is_, compress(state.values(), self._are_ours), self._values))
        )
