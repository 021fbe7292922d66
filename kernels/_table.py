"""The table of chunks on the device, from which one launch updates every parameter.

It is laid out once. From step to step only pointers to gradients and the groups' numbers change. These the
next launch carries in its own arguments, and keeps them in the table for those after it: no launch of their
own, no pinned memory, no copy to wait for, in the order of the stream, and capturable in a CUDA graph. What
a launch has no room for (gradients beyond 4,000 or so) the kernel `patch` writes before it.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy
import torch
from diagnose.kernels._device import Device, device_at
from diagnose.kernels._structs import (
    BLOCK_THREADS,
    CHUNK_ELEMENTS,
    PATCH_MANY_VALUES,
    PATCH_VALUES,
    SMALL_ELEMENTS,
    SMALL_PER_BLOCK,
    TOLD_MANY_WORDS,
    TOLD_WORDS,
    Chunk,
    Control,
    Group,
    Launch,
    LaunchMany,
    Patch,
    PatchMany,
    Row,
)

TORCH_EPSILON = 1e-6
"""What torch adds to the norm that it divides by."""

_WORD_BYTES = 8

_NOTHING: Mapping[str, int] = MappingProxyType({})

_IN_GRAPHS: list[object] = []
"""The memory that a CUDA graph refers to. It stays for good: nobody says when a graph is gone."""


def keep_for_graphs(memory: object) -> None:
    """Keeps what a CUDA graph may refer to, which itself keeps nothing alive that it did not allocate."""
    _IN_GRAPHS.append(memory)


class Table:
    """Rows, chunks, groups and counts of steps on one device, and what launches on them.

    Attributes:
        place: The device.
        steps_N: Steps taken by each row; a launch that updates adds to it.
    """

    def __init__(self, place: torch.device, rows: Sequence[Row], groups: Sequence[Group], seed: int = 0):
        self.place = place
        self._device: Device = device_at(place)
        chunks, num_large = lay_out(rows)
        num_small = len(chunks) - num_large
        self._num_blocks = num_large + -(-num_small // SMALL_PER_BLOCK)
        self._grads = self._new_grads = [row.g for row in rows]
        self._groups = self._new_groups = b"".join(map(bytes, groups))
        self.steps_N = torch.zeros(max(len(rows), 1), dtype=torch.float32, device=place)
        self._memory = {
            "rows": upload(b"".join(map(bytes, rows)), place),
            "chunks": upload(chunks.tobytes(), place),
            "groups": upload(self._groups, place),
            "control": upload(bytes(Control(seed=seed)), place),
            "workspace": torch.zeros(2 * len(chunks) + len(rows) + 1, dtype=torch.float64, device=place),
            "steps": self.steps_N,
        }
        fixed = {name: tensor.data_ptr() for name, tensor in self._memory.items()}
        sizes = {"num_rows": len(rows), "num_large": num_large, "num_small": num_small}
        self._few, self._many = Launch(**fixed, **sizes), None
        num_words = len(rows) + len(self._groups) // _WORD_BYTES
        if self._device.large_arguments and num_words > TOLD_WORDS:
            self._many = LaunchMany(**fixed, **sizes)
        self._room = TOLD_WORDS if self._many is None else TOLD_MANY_WORDS
        self._needs_patch = num_words > self._room
        self._stream = torch.cuda.current_stream(place) if place.type == "cuda" else None
        self._grids: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
        self._in_graph = False

    def point_to(self, grads: list[int]) -> None:
        """Makes the rows refer to these gradients from the next launch on: their addresses, 0 where there
        is none. The list is kept."""
        self._new_grads = grads

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Gives the groups these numbers from the next launch on."""
        self._new_groups = b"".join(map(bytes, groups))

    def prepare(self, stem: str, entry: str, defines: Mapping[str, int] = _NOTHING) -> None:
        """Has all compiled that `run` will launch: whatever is wrong with that then shows before a step.

        Raises:
            DiagnoseError: If there is no machine code for the device.
            OSError: If there is no driver.
        """
        self._grid(stem, entry, defines)
        if self._many is not None:
            self._grid(stem, entry, {**defines, "TOLD": TOLD_MANY_WORDS})
        if self._needs_patch:
            self._device.resident_blocks(
                "patch", "patch", block=BLOCK_THREADS, defines=self._patch_defines()
            )

    def run(
        self,
        stem: str,
        entry: str,
        defines: Mapping[str, int] = _NOTHING,
        *,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        clip_coef: torch.Tensor | None = None,
        outcome_4: torch.Tensor | None = None,
        max_norm: float = math.inf,
        clip_epsilon: float = TORCH_EPSILON,
    ) -> None:
        """Launches one entry point over all rows that have a gradient; `_table.cuh` says what each does.

        Args:
            stem: The kernel's name.
            entry: Its entry point.
            defines: What it is compiled with.
            grad_scale: Gradients are divided by it.
            found_inf: Unless zero, nothing is updated.
            clip_coef: Gradients are multiplied by it.
            outcome_4: Where `norm` writes.
            max_norm: Norm above which `norm` asks for clipping.
            clip_epsilon: Added to the norm before `max_norm` is divided by it.
        """
        if not self._num_blocks:
            return
        self._keep()
        launch = self._telling()
        launch.grad_scale, launch.found_inf = _address(grad_scale), _address(found_inf)
        launch.clip_coef, launch.outcome = _address(clip_coef), _address(outcome_4)
        launch.max_norm, launch.clip_epsilon = max_norm, clip_epsilon
        if launch is self._many:
            defines = {**defines, "TOLD": TOLD_MANY_WORDS}
        grid = self._grid(stem, entry, defines)
        self._device.launch(stem, entry, grid=grid, block=BLOCK_THREADS, args=(launch,), defines=defines)
        self._grads, self._groups = self._new_grads, self._new_groups

    def _telling(self) -> Launch | LaunchMany:
        """The argument of the next launch, with the words that the table does not hold yet. All of them if
        a graph may have written others."""
        all_of_it = self._is_in_graph()
        grads = self._new_grads if all_of_it or self._new_grads != self._grads else []
        groups = self._new_groups if all_of_it or self._new_groups != self._groups else b""
        num_group_words = len(groups) // _WORD_BYTES
        if num_group_words > self._room:
            self._write(self._few.groups, _WORD_BYTES, _words(self._groups), _words(groups))
            groups, num_group_words = b"", 0
        first = max(0, len(grads) + num_group_words - self._room)
        if first:
            column = self._few.rows + Row.g.offset
            self._write(column, ctypes.sizeof(Row), self._grads[:first], grads[:first])
        words = array("Q", grads[first:] if first else grads)
        words.frombytes(groups)
        launch = self._few if self._many is None or len(words) <= TOLD_WORDS else self._many
        launch.first_told, launch.num_told = first, len(words) - num_group_words
        launch.num_group_words = num_group_words
        if words:
            source, num = words.buffer_info()
            ctypes.memmove(ctypes.addressof(launch) + Launch.told.offset, source, num * _WORD_BYTES)
        return launch

    def _grid(self, stem: str, entry: str, defines: Mapping[str, int]) -> int:
        variant = (entry, tuple(defines.items()))
        grid = self._grids.get(variant)
        if grid is None:
            resident = self._device.resident_blocks(stem, entry, block=BLOCK_THREADS, defines=defines)
            grid = self._grids[variant] = max(1, min(self._num_blocks, resident))
        return grid

    def _is_in_graph(self) -> bool:
        """Whether a CUDA graph is to hold or holds launches on this table. It writes all of what it needs
        at each replay, unseen from here: from then on nothing is taken for written already."""
        if not self._in_graph and self.is_captured():
            self._in_graph = True
            _IN_GRAPHS.append(self._memory)
        return self._in_graph

    def is_captured(self) -> bool:
        """Whether a CUDA graph is captured on the current stream, if this table is on a GPU."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def _keep(self) -> None:
        """Tells the allocator of a stream that it does not know this memory to be used on."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self.place)
            if stream != self._stream:
                for tensor in self._memory.values():
                    tensor.record_stream(stream)

    def _write(self, target: int, stride_bytes: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Writes the words that differ, and those between them, in as few launches as carry them; all if a
        graph may have written others."""
        large = self._device.large_arguments
        room = PATCH_MANY_VALUES if large else PATCH_VALUES
        changed = [
            index
            for index, (before, now) in enumerate(zip(old, new, strict=True))
            if before != now or self._in_graph
        ]
        done = 0
        for first in changed:
            if first < done:
                continue
            done = min(first + room, changed[-1] + 1)
            patch = (PatchMany if large else Patch)(
                target=target + first * stride_bytes,
                stride=stride_bytes // _WORD_BYTES,
                count=done - first,
            )
            patch.values[: done - first] = list(new[first:done])
            self._device.launch(
                "patch",
                "patch",
                grid=-(-(done - first) // BLOCK_THREADS),
                block=BLOCK_THREADS,
                args=(patch,),
                defines=self._patch_defines(),
            )

    def _patch_defines(self) -> Mapping[str, int]:
        return {"VALUES": PATCH_MANY_VALUES} if self._device.large_arguments else _NOTHING


def lay_out(rows: Sequence[Row]) -> tuple[numpy.ndarray, int]:
    """Divides rows into chunks, and notes in each row which are its own.

    Returns:
        The chunks as they lie in memory, the large ones first, and how many of these there are.
    """
    large: list[numpy.ndarray] = []
    small: list[list[int]] = []
    first = 0
    for index, row in enumerate(rows):
        row.num_chunks = 0
        if row.count > SMALL_ELEMENTS:
            starts = numpy.arange(0, row.count, CHUNK_ELEMENTS, dtype=numpy.int64)
            counts = numpy.minimum(row.count - starts, CHUNK_ELEMENTS)
            large.append(numpy.stack([starts, index | counts << 32], axis=1))
            row.first_chunk, row.num_chunks = first, len(starts)
            first += len(starts)
    for index, row in enumerate(rows):
        if 0 < row.count <= SMALL_ELEMENTS:
            row.first_chunk, row.num_chunks = first + len(small), 1
            small.append([0, index | row.count << 32])
    packed = numpy.array(small, dtype=numpy.int64).reshape(-1, 2)
    chunks = numpy.concatenate([*large, packed])
    assert chunks.nbytes == len(chunks) * ctypes.sizeof(Chunk)
    return chunks, first


def upload(content: bytes, place: torch.device) -> torch.Tensor:
    """Bytes as memory of a device, never less than a word."""
    buffer = bytearray(content or bytes(_WORD_BYTES))
    return torch.frombuffer(buffer, dtype=torch.uint8).to(place, copy=True)


def _words(groups: bytes) -> list[int]:
    words: list[int] = numpy.frombuffer(groups, dtype=numpy.uint64).tolist()
    return words


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
