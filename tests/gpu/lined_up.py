"""Tensors of the emulation's tests, brought to a device, and the table over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diagnose.kernels._structs import Group, Row
from diagnose.kernels._table import Table

from tests.emulated_table import COPY_FLAGS, Tensors, pair_of

LARGEST_VECTOR_BYTES = 16


def brought_to(place: torch.device, rows: Sequence[Tensors]) -> list[Tensors]:
    """The same numbers on a device, as far from an aligned address as they are here."""
    return [{name: brought(place, tensor) for name, tensor in row.items()} for row in rows]


def brought(place: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """One of them."""
    each = tensor.element_size()
    room = LARGEST_VECTOR_BYTES // each
    whole = torch.empty(tensor.numel() + 2 * room, dtype=tensor.dtype, device=place)
    skip = (tensor.data_ptr() - whole.data_ptr()) % LARGEST_VECTOR_BYTES // each
    return whole[skip : skip + tensor.numel()].copy_(tensor)


def table_over(rows: Sequence[Tensors], groups: Sequence[Group], seed: int = 0) -> Table:
    """The table that ships, over these rows."""
    place = rows[0]["g"].device
    structs = [
        Row(
            **{name: tensor.data_ptr() for name, tensor in row.items()},
            count=row["g"].numel(),
            pair=pair_of(row),
            flags=COPY_FLAGS[row["copy"].dtype] if "copy" in row else 0,
            dice=number,
        )
        for number, row in enumerate(rows)
    ]
    return Table(place, structs, groups, seed)


def brought_back(rows: Sequence[Tensors]) -> list[Tensors]:
    """On the CPU."""
    return [{name: tensor.cpu() for name, tensor in row.items()} for row in rows]
