"""Lines up tensors for `emulated.py`: written from the layouts alone, not with the code that ships."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diagnose.kernels._structs import PAIRS, Chunk, Control, Group, Launch, Row
from diagnose.kernels.base import Kernel
from emulated import EmulatedDevice

Tensors = dict[str, torch.Tensor]
"""The tensors of one row by field: `p`, `g`, `m`, `v`, `v_max`, `copy`, `v_scales`."""

COPY_FLAGS = {torch.bfloat16: 1, torch.float16: 2}
NAMES = ("p", "g", "m", "v", "v_max", "copy", "v_scales")


def pair_of(row: Tensors) -> int:
    """The number of a row's dtypes. Codes of moments count as fp32."""
    g = row["g"].dtype
    p = row["p"].dtype if "p" in row else g
    states = row["m"].dtype if "m" in row else p
    if states is torch.uint8:
        states = p if (p, g, p) in PAIRS else torch.float32
    return PAIRS[(p, g, states)]


class EmulatedTable:
    """Tensors and settings in the layout that the kernels read.

    Attributes:
        rows: What each row holds.
        steps: Steps taken, by row.
        outcome: What `gradient_norm` found: norm, factor, whether something is not finite.
    """

    def __init__(
        self, rows: Sequence[Tensors], groups: Sequence[Group] = (), of: Sequence[int] | None = None
    ) -> None:
        self.rows = rows
        self.groups = (Group * max(1, len(groups)))(*groups)
        self.steps = np.zeros(max(1, len(rows)), np.float32)
        self.control = Control()
        self.outcome = np.zeros(4, np.float32)
        of = of or [0] * len(rows)
        counts = [row["g"].numel() for row in rows]
        large = [(i, start) for i, n in enumerate(counts) if n > 2048 for start in range(0, n, 16384)]
        small = [(i, 0) for i, n in enumerate(counts) if 0 < n <= 2048]
        order = [*large, *small]
        self.num_large, self.num_small = len(large), len(small)
        self.chunks = (Chunk * max(1, len(order)))(
            *(Chunk(start=start, row=i, count=min(16384, counts[i] - start)) for i, start in order)
        )
        self.workspace = np.full(2 * len(order) + len(rows), np.nan)
        self.structs = (Row * max(1, len(rows)))()
        for i, row in enumerate(rows):
            mine = [k for k, (index, _) in enumerate(order) if index == i]
            pointers = {name: row[name].data_ptr() for name in NAMES if name in row}
            self.structs[i] = Row(
                **pointers,
                count=counts[i],
                group=of[i],
                pair=pair_of(row),
                flags=COPY_FLAGS[row["copy"].dtype] if "copy" in row else 0,
                first_chunk=mine[0] if mine else 0,
                num_chunks=len(mine),
                dice=i,
            )
            if counts[i] == 0:
                self.structs[i].g = 1  # a tensor without elements has a gradient, if no address

    def launch_struct(self, **fields: Any) -> Launch:
        """The argument of a launch."""
        return Launch(
            rows=ctypes.addressof(self.structs),
            chunks=ctypes.addressof(self.chunks),
            groups=ctypes.addressof(self.groups),
            steps=self.steps.ctypes.data,
            control=ctypes.addressof(self.control),
            workspace=self.workspace.ctypes.data,
            outcome=self.outcome.ctypes.data,
            num_rows=len(self.rows),
            num_large=self.num_large,
            num_small=self.num_small,
            **{"max_norm": 1.0, "clip_epsilon": 1e-6, **fields},
        )

    def run(
        self,
        device: EmulatedDevice,
        kernel: Kernel,
        *,
        grid: int = 3,
        defines: Mapping[str, int] | None = None,
        **fields: Any,
    ) -> None:
        """Launches all entries of a kernel, one after another. `fields` go into the launch."""
        for entry in kernel.entries:
            device.launch(kernel, entry, grid, 256, (self.launch_struct(**fields),), defines or {})
