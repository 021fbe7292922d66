"""The kernels' bits: those that were written down, whatever the order of threads and the build."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from diagnose.kernels._structs import PAIRS, GroupFlag
from diagnose.kernels.base import Kernel
from emulated import EmulatedDevice
from emulated_table import EmulatedTable, Tensors

from tests.test_kernels_numerics import KERNELS, group_of, row_of, settings_of


def bits(rows: list[Tensors]) -> str:
    """A hash of all that the rows hold."""
    digest = hashlib.sha256()
    for row in rows:
        for name in sorted(row):
            digest.update(row[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def exact_rows(kernel: Kernel, *, offset: int, flags: int = 0) -> list[Tensors]:
    """Rows of every dtype whose numbers come from integers alone: the same on every machine."""
    rows = []
    for dtypes in PAIRS:
        for size in (5, 2500, 17000):
            row = row_of(kernel, size, dtypes, 0, offset=offset, flags=flags)
            for k, (name, tensor) in enumerate(sorted(row.items())):
                numbers = (torch.arange(size) * (2654435761 + 2 * k) % 8191 - 4095).double() / 2048
                tensor.copy_(numbers.square() / 4 if name in ("v", "v_max") else numbers)
            rows.append(row)
    return rows


FLAGS = {
    "stochastic": GroupFlag.STOCHASTIC,
    "amsgrad": GroupFlag.AMSGRAD,
    "maximize": GroupFlag.MAXIMIZE,
    "unscaled": GroupFlag.UNSCALE,
}


def stepped(case: str, *, seed: int = 0, grid: int = 3, offset: int = 0) -> str:
    """The bits after two steps."""
    name, _, feature = case.partition(" ")
    kernel = KERNELS[name]
    flags = int(settings_of(kernel).flags | FLAGS.get(feature, 0))
    rows = exact_rows(kernel, offset=offset, flags=flags)
    for row in rows if feature == "copy" else ():
        row["copy"] = torch.zeros(row["g"].numel() + offset, dtype=torch.bfloat16)[offset:]
    table = EmulatedTable(rows, [group_of(settings_of(kernel, flags=flags))])
    table.control.seed = 42
    factor = np.array([0.3], np.float32)
    fields = {"scale": {"clip_coef": factor.ctypes.data}, "unscaled": {"grad_scale": factor.ctypes.data}}
    device = EmulatedDevice(seed)
    for _ in range(2):
        table.run(device, kernel, grid=grid, **fields.get(feature or name, {}))
    return bits(rows)


# To be seen again on a GPU: the same sources, the same bits. A change here is a change of numerics.
GOLDEN = {
    "adamw": "c7b77f79c3ba24f7",
    "adamw amsgrad": "4a67bb04a4349c63",
    "adamw copy": "8c7de15b8574665f",
    "adamw maximize": "4d8a2649523c4f3c",
    "adamw stochastic": "d0287196f00aea54",
    "adamw unscaled": "1f7aee69f7873164",
    "lamb": "cd24a4f649ecf53f",
    "lion": "321e9b86e3e482ef",
    "scale": "f5460f626cd3cdc5",
    "sgd": "0138c5ec16447206",
    "sgd unscaled": "68111c4338d338d6",
}


@pytest.mark.parametrize("case", GOLDEN)
def test_the_bits_are_those_that_were_written_down(case: str) -> None:
    assert stepped(case) == GOLDEN[case]


@pytest.mark.parametrize("case", GOLDEN)
def test_order_of_threads_grid_and_alignment_change_no_bit(case: str) -> None:
    found = {stepped(case, seed=seed, grid=grid) for seed, grid in ((5, 1), (900, 2), (77, 7))}
    found.add(stepped(case, offset=1))
    assert found == {GOLDEN[case]}


def test_a_kernel_for_fewer_dtypes_and_features_gives_the_same_bits() -> None:
    kernel, rows = KERNELS["adamw"], []
    for defines in ({}, kernel.variants["bf16-stochastic"]):
        row = row_of(kernel, 5000, (torch.bfloat16,) * 3, 1)
        table = EmulatedTable([row], [group_of(settings_of(kernel, flags=int(GroupFlag.STOCHASTIC)))])
        table.run(EmulatedDevice(), kernel, defines=defines)
        rows.append(row)
    assert bits(rows[:1]) == bits(rows[1:])
