"""Moments of one byte per element: torch's layout into codes and back, as `adamw_8bit.cu` codes them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from diagnose.kernels._layout import fits
from diagnose.kernels.adamw_8bit import BLOCK_ELEMENTS, code_values

SMALLEST = 2.0**-120
"""A block whose largest element is less is stored as zeros: its scale has no finite reciprocal."""

PIECE_ELEMENTS = 1 << 22
"""So much is coded at a time, a multiple of a block: that takes up to 40 bytes for each, where there may be
little memory left."""


def decoded(
    codes: torch.Tensor, scales_B: torch.Tensor, *, signed: bool, like: torch.Tensor
) -> torch.Tensor:
    """The values of `codes` in fp32: a first moment if `signed`, else the root of a second one.

    They lie in memory as `like` does. The codes may lie otherwise: a scale is of what lies together there.
    """
    made = torch.empty_like(like, dtype=torch.float32, memory_format=torch.preserve_format)
    coded = made if fits([made, codes]) else torch.empty_like(codes, dtype=torch.float32)
    known = _values(signed, codes.device)
    for made_N, code_N, scale_B in _pieces(coded, codes, scales_B):
        scale_N = scale_B.repeat_interleave(BLOCK_ELEMENTS)[: code_N.numel()]
        made_N.copy_(known[code_N.long()] * scale_N)
    return made if coded is made else made.copy_(coded)


def encode(values: torch.Tensor, codes: torch.Tensor, scales_B: torch.Tensor, *, signed: bool) -> None:
    """Writes codes and scales of `values`, which lie in memory as the codes do. Rounds to nearest."""
    known = _values(signed, values.device)
    positive = known[: len(known) // 2] if signed else known
    for value_N, into_N, scale_B in _pieces(values, codes, scales_B):
        value_N = value_N.float()
        blocks = torch.nn.functional.pad(value_N.abs(), (0, -value_N.numel() % BLOCK_ELEMENTS))
        largest_B = blocks.view(-1, BLOCK_ELEMENTS).amax(1)
        empty_B = largest_B < SMALLEST
        scale_B.copy_(torch.where(empty_B, 0.0, largest_B / positive[-1]))
        inverse_B = torch.where(empty_B, 0.0, positive[-1] / largest_B)
        share_N = value_N.abs() * inverse_B.repeat_interleave(BLOCK_ELEMENTS)[: value_N.numel()]
        code_N = torch.bucketize(share_N, (positive[1:] + positive[:-1]) / 2)
        if signed:
            code_N += 128 * (value_N < 0)
        else:
            code_N.clamp_(min=(share_N > 0).long())  # what is above 0 stays above 0
        into_N.copy_(code_N)


def _pieces(
    values: torch.Tensor, codes: torch.Tensor, scales_B: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Both, in the order of memory, and the scales, as views of so much at a time."""
    parts = (_in_memory_order(values), _in_memory_order(codes), scales_B)
    sizes = (PIECE_ELEMENTS, PIECE_ELEMENTS, PIECE_ELEMENTS // BLOCK_ELEMENTS)
    return zip(*map(torch.Tensor.split, parts, sizes), strict=True) if codes.numel() else iter(())


def in_order_of(param: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """A copy of a moment in fp32 that lies in memory as its parameter does, and so as its codes do: one of
    a checkpoint may lie otherwise."""
    made = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    return made.detach().copy_(moment)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


@functools.cache
def _values(signed: bool, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(code_values(signed=signed)).to(device)
