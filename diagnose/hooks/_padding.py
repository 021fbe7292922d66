"""Tells how many tokens of a batch are padding."""

from __future__ import annotations

import torch

MAX_STRAY_SHARE = 0.02
"""A padding token is hardly ever found between others."""

MIN_PADDED_ROWS = 0.25
"""Fewer rows that end in the same token twice may do so by chance."""

MAX_ELEMENTS = 1 << 20
"""A larger batch would take long to look at."""


def padding_of(ids: torch.Tensor) -> tuple[int, int] | None:
    """Returns the padding tokens of a batch and all its tokens.

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
        best = max(_runs(ids), _runs(ids.flip(1)))
    return best, ids.numel()


def _runs(ids: torch.Tensor) -> int:
    last = ids[:, -1]
    value = last.mode().values
    equal = ids == value
    run = equal.flip(1).to(torch.int64).cumprod(1).sum(1)
    padding = int(run.sum())
    stray = int(equal.sum()) - padding
    padded_rows = float((run >= 2).float().mean())
    rest = ids.numel() - padding
    if padded_rows < MIN_PADDED_ROWS or (rest and stray > MAX_STRAY_SHARE * rest):
        return 0
    same_everywhere = bool((run == run[0]).all())
    return 0 if same_everywhere and padding < 0.1 * ids.numel() else padding
