"""What a rank has not sent of its gradients yet: it is added to the next ones, so that nothing is lost."""

from __future__ import annotations

from typing import Any

import torch


class Unsent:
    """The rest of each parameter's gradient.

    Kept by parameter, because a fresh reducer deals them out to other buckets after its first step. As much
    memory as the gradients.
    """

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def add_to(self, bucket: Any) -> None:
        """Adds what is left of earlier steps to the gradients in a bucket."""
        for part, parameter in _parts(bucket, bucket.buffer()):
            left = self._of.get(id(parameter))
            if left is not None:
                part.add_(left)

    def keep(self, bucket: Any, left_N: torch.Tensor) -> None:
        """Takes note of what is left of a bucket. What is not finite is forgotten: it would never leave."""
        left_N.nan_to_num_(0.0, 0.0, 0.0)
        for part, parameter in _parts(bucket, left_N):
            self._of[id(parameter)] = part


def _parts(bucket: Any, buffer_N: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A buffer, cut into what belongs to each parameter of a bucket."""
    parameters = bucket.parameters()
    parts = buffer_N.split([parameter.numel() for parameter in parameters])
    return list(zip(parts, parameters, strict=True))
