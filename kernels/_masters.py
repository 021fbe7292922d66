"""Weights in fp32 behind parameters of 16 bits, which are their rounding."""

from __future__ import annotations

import torch

COPY_FLAGS = {torch.bfloat16: 1, torch.float16: 2}
"""What a row's flags say of the type of its low-precision copy, as `RowFlag` in `_table.cuh`."""


def has_master(param: torch.Tensor) -> bool:
    """Whether a parameter is one that loses what its master keeps."""
    return param.dtype in COPY_FLAGS


def made_from(param: torch.Tensor) -> torch.Tensor:
    """A master of a parameter as it is now, in the same order in memory."""
    return param.detach().to(torch.float32, memory_format=torch.preserve_format)


@torch.no_grad()
def take_over(master: torch.Tensor, param: torch.Tensor) -> None:
    """Gives the master what someone else has written into the parameter: where that is not its rounding.
    Does not wait for the device."""
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
