"""Parameters that are sharded over ranks (DTensor, as FSDP2 makes them): what of each is on this rank.

A formula that takes each element by itself is the same on a shard. Nothing here talks to another rank.
"""

from __future__ import annotations

from typing import Any

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Told by its class's name: importing it takes a second."""
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part that lies on this rank; of another tensor all."""
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part


def shard_number(tensor: torch.Tensor) -> int:
    """Which of the parts of a sharded tensor is on this rank: the same number on ranks that hold the same
    part; 0 for another tensor."""
    if not is_sharded(tensor):
        return 0
    sharded: Any = tensor
    mesh, number = sharded.device_mesh, 0
    for size, at, placement in zip(mesh.shape, mesh.get_coordinate(), sharded.placements, strict=True):
        if not placement.is_replicate():
            number = number * size + at
    return number


def own_part_alike(grad: torch.Tensor | None, param: torch.Tensor) -> torch.Tensor | None:
    """The part of a gradient on this rank, if it is that of the parameter's part. Otherwise, as where it is
    still to be summed over ranks, the gradient as it is, which fits no part."""
    if grad is None or not is_sharded(grad) or not is_sharded(param):
        return grad
    of_grad: Any = grad
    of_param: Any = param
    if of_grad.placements != of_param.placements or of_grad.device_mesh != of_param.device_mesh:
        return grad
    return own_part(grad)
