"""Tells how many tokens of a batch are padding."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_STRAY_SHARE = 0.02
"""A padding token is hardly ever found between others."""

MIN_PADDED_ROWS = 0.25
"""Fewer rows that end in the same token twice may do so by chance."""

MULTIPLE = 8
"""Rows are filled up to a multiple of this for the matrix units of devices (`pad_to_multiple_of`)."""

MAX_ELEMENTS = 1 << 20
"""A larger batch would take long to look at."""


class Padding(NamedTuple):
    """Tokens of one batch, or of several.

    Attributes:
        padding: Those that are padding.
        overlong: Those of them in columns that are padding in every row: the batch's longest row does
            without them. 0 where they only fill it up to a multiple of 8.
        tokens: All.
    """

    padding: int
    overlong: int
    tokens: int


def padding_of(ids: torch.Tensor) -> Padding | None:
    """Returns how much of a batch is padding.

    Padding is a run of one value at the end, or at the beginning, of rows of integers of shape `(B, T)`;
    the runs differ in length from row to row, or reach over a tenth of them all.

    Returns:
        `None` for what is not a batch of token ids in host memory.
    """
    if ids.is_floating_point() or ids.dim() != 2 or ids.dtype is torch.bool or ids.device.type != "cpu":
        return None
    rows, length = ids.shape
    if rows < 2 or length < 4 or ids.numel() > MAX_ELEMENTS:
        return None
    with torch.no_grad():
        return max(_runs(ids), _runs(ids.flip(1)))


def _runs(ids: torch.Tensor) -> Padding:
    last = ids[:, -1]
    value = last.mode().values
    equal = ids == value
    run = equal.flip(1).to(torch.int64).cumprod(1).sum(1)
    padding = int(run.sum())
    stray = int(equal.sum()) - padding
    padded_rows = float((run >= 2).float().mean())
    rest = ids.numel() - padding
    if padded_rows < MIN_PADDED_ROWS or (rest and stray > MAX_STRAY_SHARE * rest):
        return Padding(0, 0, ids.numel())
    spare = int(run.min())
    overlong = spare * len(ids)
    if overlong == padding and padding < 0.1 * ids.numel():  # rows of one length that may end like this
        return Padding(0, 0, ids.numel())
    if spare < MULTIPLE and ids.shape[1] % MULTIPLE == 0:
        overlong = 0
    return Padding(padding, overlong, ids.numel())
