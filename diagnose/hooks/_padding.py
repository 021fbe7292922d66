"""Tells how many tokens of a batch are padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from diagnose.hooks._batch import MAX_DEPTH, first_tensor, parts_of
from diagnose.hooks._held import values_of

MAX_STRAY_SHARE = 0.02
"""A padding token is hardly ever found between others."""

MIN_PADDED_ROWS = 0.25
"""Fewer rows that end in the same token twice may do so by chance."""

MULTIPLE = 8
"""Rows are filled up to a multiple of this for the matrix units of devices (`pad_to_multiple_of`)."""

MAX_ELEMENTS = 1 << 20
"""A larger batch would take long to look at."""

MIN_COLUMNS = 8
"""Of fewer columns each may be a sequence, or a feature of a table, which is no sequence."""

FEW_FEATURES = 8
"""So many of a place's numbers tell whether it is filled up."""

MIN_ROWS, MIN_LENGTH = 2, 4

WIDE = (torch.int32, torch.int64)
"""What token ids and lengths are kept in; smaller integers of three axes are images."""

MAX_MASKED = 3
"""Axes of sequences that masks may tell of: samples, time, features."""

MAX_PARTS = 32
"""Lengths and masks come among the first few parts of a batch."""


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


class MaskedPadding(Padding):
    """Padding that a mask alone tells of: what it leaves out may be features, or be foretold."""

    __slots__ = ()


def padding_in(batch: Any, loaded: Iterable[torch.Tensor] = ()) -> Padding | None:
    """Returns how much of a batch, or of what a model is called with, is padding: its first tensor counts.

    Args:
        batch: A tensor, or nested sequences and mappings of tensors.
        loaded: What else a loader gave for that call: one that has numbers where these are masked tells
            that the model is to find them.

    Returns:
        `None` where the tensor holds no token ids in host memory, and nothing beside it says how long its
        sequences are: neither lengths nor a mask.
    """
    tensor = first_tensor(batch)
    if tensor is None:
        return None
    padding = padding_of(tensor)
    if padding is not None or not tensor.is_cpu:
        return padding
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    with torch.no_grad():
        told = (padding_after(tensor, each) for each in _lengths(batch, tensor.shape))
        padding = next((each for each in told if each is not None), None)
        return padding or _masked(tensor, batch, loaded)


def _masked(tensor: torch.Tensor, batch: Any, loaded: Iterable[torch.Tensor]) -> Padding | None:
    """Returns how much of a batch is padding by the masks in it. Masked pictures may lack colours."""
    if tensor.dim() > MAX_MASKED:
        return None
    for lengths in _told_by_masks(batch, tensor):
        padding = padding_after(tensor, lengths)
        if padding is None:
            continue
        others = [
            each[:, : tensor.shape[1]]
            for each in chain(tensors_in(batch), loaded)
            if each is not tensor and each.is_cpu and each.is_floating_point()
            if each.layout is torch.strided and not each.is_nested and each.dim() > 1
            if len(each) == len(tensor) and _has_its_places(each, tensor)
        ]
        return MaskedPadding(*padding) if all(padding_after(each, lengths) for each in others) else None
    return None


def _has_its_places(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the second axis of a tensor may be the time that another one's is: of fewer axes than that
    with its features, only where it is as long."""
    if other.dim() < tensor.dim() and tensor.shape[2:].numel() > 1:
        return other.shape[1] == tensor.shape[1]
    return other.shape[1] >= tensor.shape[1]


def padding_beside(given: Any) -> Padding | None:
    """Returns how much of what a model is called with is padding, where its first tensor tells nothing and
    token ids of as many rows stand beside it: `model(user, history)`. Of several the most padded count.

    Only runs that differ in length from row to row count here, of values that are no mask's and no labels';
    and where the first tensor has a place for each token, it must be filled up there as well.

    Args:
        given: Nested sequences and mappings of tensors.

    Returns:
        `None` where no such token ids stand there.
    """
    tensor = first_tensor(given)
    if tensor is None or not tensor.dim():
        return None
    found: list[Padding] = []
    with torch.no_grad():
        for each in tensors_in(given):
            if each is tensor or each.dim() != 2 or each.dtype not in WIDE or len(each) != len(tensor):
                continue
            if each.layout is not torch.strided:
                continue
            padding = padding_of(each) if _may_be_tokens(each) else None
            if padding is None or (padding.padding and padding.overlong == padding.padding):
                continue
            if not padding.padding or _is_filled(tensor, each, padding.padding):
                found.append(padding)
    return max(found, default=None)


def _may_be_tokens(ids: torch.Tensor) -> bool:
    """Whether whole numbers in host memory are no labels (-100), no mask or kind of two values, and no rows
    that are all alike, such as the atoms of one molecule."""
    if not ids.is_cpu or not 0 < ids.numel() <= MAX_ELEMENTS:
        return False
    return int(ids.min()) >= 0 and int(ids.max()) > 1 and bool((ids != ids[0]).any())


def _is_filled(tensor: torch.Tensor, ids: torch.Tensor, padding: int) -> bool:
    """Whether a tensor is of one value for each feature where these ids have so much padding, if it has a
    place for each of them: frames have labels that end alike, and go on themselves."""
    if tensor.shape[:2] != ids.shape:
        return True
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    while tensor.dim() > 3:
        tensor = tensor[..., 0]
    features = tensor.reshape(*ids.shape, -1)[..., :FEW_FEATURES]
    for rows, numbers in ((ids, features), (ids.flip(1), features.flip(1))):
        if _runs(rows).padding == padding:
            run = (rows == rows[:, -1].mode().values).flip(1).to(torch.int64).cumprod(1).flip(1).bool()
            filling = numbers[run]
            if bool((filling == filling[0]).all()):
                return True
    return False


def padding_of(ids: torch.Tensor) -> Padding | None:
    """Returns how much of a batch is padding.

    Padding is a run of one value at the end, or at the beginning, of rows of integers of shape `(B, T)`;
    the runs differ in length from row to row, or reach over a tenth of them all. Where rows have none,
    columns may: `(T, B)`. Documents of sentences, and choices, are rows too: `(B, S, T)`.

    Returns:
        `None` for what is not a batch of token ids in host memory.
    """
    if ids.is_floating_point() or ids.dtype is torch.bool or ids.device.type != "cpu":
        return None
    by_column = ids.dim() == 2 and ids.shape[0] >= MIN_LENGTH and ids.shape[1] >= MIN_COLUMNS
    if ids.dim() == 3 and ids.dtype in WIDE and ids.numel() <= MAX_ELEMENTS:
        ids = ids.flatten(0, 1)
    if ids.dim() != 2 or ids.numel() > MAX_ELEMENTS:
        return None
    by_row = ids.shape[0] >= MIN_ROWS and ids.shape[1] >= MIN_LENGTH
    if not by_row and not by_column:
        return None
    found = Padding(0, 0, ids.numel())
    with torch.no_grad():
        if by_row:
            found = max(_runs(ids), _runs(ids.flip(1)))
        if by_column and not found.padding:
            columns = ids.t()
            found = max(_runs(each, some=True) for each in (columns, columns.flip(1)))
    return found


def padding_after(tensor: torch.Tensor, lengths: torch.Tensor) -> Padding | None:
    """Returns how much of a batch of sequences is padding, if these are their lengths.

    They are where along one axis of the tensor one value fills up each sequence, from its length on and not
    before: the numbers of classes do not.

    Args:
        tensor: Sequences of numbers of any type, of shape `(B, T, ...)`, `(T, B, ...)`, or with features
            before their time.
        lengths: Whole numbers, of shape `(B,)`.
    """
    count = len(lengths)
    if count < MIN_ROWS or not 2 <= tensor.dim() <= 4:
        return None
    least, most = int(lengths.min()), int(lengths.max())
    if least < 1:
        return None
    for of_sample in (0, 1):
        for of_time in range(tensor.dim()):
            if of_time != of_sample and tensor.shape[of_sample] == count:
                rows = tensor.movedim((of_sample, of_time), (0, 1))
                length = rows.shape[1]
                if length >= max(MIN_LENGTH, most) and _fill_up(rows, lengths):
                    spare = length - most
                    overlong = 0 if spare < MULTIPLE and length % MULTIPLE == 0 else spare * count
                    return Padding(count * length - int(lengths.sum()), overlong, count * length)
    return None


def _fill_up(rows: torch.Tensor, lengths: torch.Tensor) -> bool:
    """Whether one value, and nothing else, stands in rows of shape `(B, T, ...)` from these lengths on."""
    every = -(-rows.numel() // MAX_ELEMENTS)
    places = torch.arange(0, rows.shape[1], every, device="cpu")
    filling = rows[:, ::every][places >= lengths[:, None]]
    if not filling.numel():
        return False
    value = filling.flatten()[0]
    if not bool((filling == value).all()):
        return False
    filled = (lengths < rows.shape[1]).nonzero().flatten()
    before = rows[filled, lengths[filled] - 1] == value
    return float(before.reshape(len(filled), -1).all(1).float().mean()) <= MIN_PADDED_ROWS


def _lengths(batch: Any, shape: torch.Size, depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Yields what may be the lengths of sequences of such a shape, in nested sequences and mappings: whole
    numbers, one for each of them."""
    parts: Iterable[Any] = ()
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 1 and len(batch) in shape[:2] and batch.dtype in WIDE and batch.is_cpu:
            yield batch
    elif isinstance(batch, Mapping):
        parts = values_of(batch)
    elif isinstance(batch, (tuple, list)):
        if len(batch) in shape[:2] and all(type(each) is int and 0 < each <= max(shape) for each in batch):
            yield torch.tensor(batch, dtype=torch.int64, device="cpu")
        else:
            parts = batch
    if depth:
        for part in islice(parts, MAX_PARTS):
            yield from _lengths(part, shape, depth - 1)


def _told_by_masks(batch: Any, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields what masks beside a tensor of sequences may say of their lengths: one number of 0 or 1 for
    each place, of which each row's first ones are of one kind, and the rest of the other."""
    shape = tensor.shape
    for mask in tensors_in(batch):
        if mask is tensor or not mask.numel():
            continue
        if mask.dim() != 2 or not mask.is_cpu or mask.layout is not torch.strided or mask.is_nested:
            continue
        for kind in (mask, mask.t()):
            if kind.shape != shape[:2] and kind.shape != shape[1::-1]:
                continue
            if kind.numel() > MAX_ELEMENTS or not bool(((kind == 0) | (kind == 1)).all()):
                break
            places = torch.arange(kind.shape[1], device="cpu")
            for valid in (kind == 1, kind == 0):
                lengths = valid.sum(1)
                # Rows of one length may have been cut there on purpose, for the model to continue them.
                if int(lengths.min()) < int(lengths.max()) and bool(
                    (valid == (places < lengths[:, None])).all()
                ):
                    yield lengths


def tensors_in(batch: Any, depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Yields the tensors among the first few parts of nested sequences and mappings."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth:
        for part in islice(parts_of(batch), MAX_PARTS):
            yield from tensors_in(part, depth - 1)


def _runs(ids: torch.Tensor, *, some: bool = False) -> Padding:
    """Returns what the runs at the ends of rows are.

    Args:
        ids: Token ids of shape `(B, T)`.
        some: Whether each row has some token that is none: columns of one value are no sequences.
    """
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
    if some and int(run.max()) == ids.shape[1]:
        return Padding(0, 0, ids.numel())
    spare = int(run.min())
    overlong = spare * len(ids)
    if overlong == padding and padding < 0.1 * ids.numel():  # rows of one length that may end like this
        return Padding(0, 0, ids.numel())
    if spare < MULTIPLE and ids.shape[1] % MULTIPLE == 0:
        overlong = 0
    return Padding(padding, overlong, ids.numel())
