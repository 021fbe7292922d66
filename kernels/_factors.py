"""What is still to be done to the gradients of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What a step multiplies its gradients by.

    Attributes:
        grad_scale: What they are to be divided by.
        clip_coef: What they are then to be multiplied by.
        torch_unscales: Whether torch's own step of this optimizer divides by itself.
    """

    grad_scale: torch.Tensor | None
    clip_coef: torch.Tensor | None
    torch_unscales: bool

    def carry_out(self, grads: Sequence[torch.Tensor]) -> None:
        """Does to gradients in memory what torch's own step expects to be done."""
        if self.grad_scale is not None and not self.torch_unscales:
            inverse = self.grad_scale.double().reciprocal().float()
            for grad in grads:
                grad.mul_(inverse.to(grad.device))
        if self.clip_coef is not None:
            for grad in grads:
                grad.mul_(self.clip_coef.to(grad.device))


def at(place: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A number on a device as kernels there read it."""
    return None if tensor is None else tensor.to(place, torch.float32, non_blocking=True)
