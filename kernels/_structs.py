"""What the kernels read: the layouts that `_table.cuh` declares, field by field."""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64

import torch

CHUNK_ELEMENTS = 16384
"""Of a large row, in one chunk: fixed, so that partial sums depend on no device."""

SMALL_ELEMENTS = 2048
"""The most that a row packed with others has: one warp updates it."""

BLOCK_THREADS = 256
SMALL_PER_BLOCK = BLOCK_THREADS // 32

PATCH_VALUES = 510
"""What one launch of `patch` carries in the 4 KB of arguments that every driver takes."""

PATCH_MANY_VALUES = 4092
"""Likewise in the 32 KB that drivers for CUDA 12.1 and later take."""

TOLD_WORDS, TOLD_MANY_WORDS = 498, 4080
"""What any other launch carries beside its 14 fixed words, in as much."""


class Row(ctypes.Structure):
    """One parameter."""

    _fields_ = (
        ("p", c_uint64),
        ("g", c_uint64),
        ("m", c_uint64),
        ("v", c_uint64),
        ("v_max", c_uint64),
        ("copy", c_uint64),
        ("v_scales", c_uint64),
        ("count", c_int64),
        ("group", c_int32),
        ("pair", c_int32),
        ("flags", c_int32),
        ("first_chunk", c_int32),
        ("num_chunks", c_int32),
        ("dice", c_uint32),
        ("zero", c_int32 * 2),
    )


class Chunk(ctypes.Structure):
    """A run of elements of one row."""

    _fields_ = (("start", c_int64), ("row", c_int32), ("count", c_int32))


class Group(ctypes.Structure):
    """What the parameters of one group have in common."""

    _fields_ = (
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("lr_tensor", c_uint64),
        ("flags", c_uint32),
        ("zero", c_uint32 * 3),
    )


class Control(ctypes.Structure):
    """Counters of arrivals, which every launch leaves at zero, and the seed of the random numbers."""

    _fields_ = (
        ("norm_arrivals", c_uint32),
        ("step_arrivals", c_uint32),
        ("nonfinite", c_uint32),
        ("zero", c_uint32),
        ("seed", c_uint64),
        ("rest", c_uint64 * 5),
    )


class Launch(ctypes.Structure):
    """The one argument of every kernel but `patch`: what is fixed, and words that the table does not hold
    yet, addresses of gradients before those of groups."""

    _fields_ = (
        ("rows", c_uint64),
        ("chunks", c_uint64),
        ("groups", c_uint64),
        ("steps", c_uint64),
        ("control", c_uint64),
        ("workspace", c_uint64),
        ("grad_scale", c_uint64),
        ("found_inf", c_uint64),
        ("clip_coef", c_uint64),
        ("outcome", c_uint64),
        ("num_rows", c_int32),
        ("num_large", c_int32),
        ("num_small", c_int32),
        ("first_told", c_int32),
        ("max_norm", c_float),
        ("clip_epsilon", c_float),
        ("num_told", c_int32),
        ("num_group_words", c_int32),
        ("told", c_uint64 * TOLD_WORDS),
    )


class LaunchMany(ctypes.Structure):
    """`Launch` with more room."""

    _fields_ = (*Launch._fields_[:-1], ("told", c_uint64 * TOLD_MANY_WORDS))


class Patch(ctypes.Structure):
    """The argument of `patch`: words to write into a table, carried by the launch itself."""

    _fields_ = (
        ("target", c_uint64),
        ("stride", c_int32),
        ("count", c_int32),
        ("values", c_uint64 * PATCH_VALUES),
    )


class PatchMany(ctypes.Structure):
    """`Patch` with more room."""

    _fields_ = (
        ("target", c_uint64),
        ("stride", c_int32),
        ("count", c_int32),
        ("values", c_uint64 * PATCH_MANY_VALUES),
    )


SIZES = {Row: 96, Chunk: 16, Group: 64, Control: 64, Launch: 4096, LaunchMany: 32752}
SIZES |= {Patch: 4096, PatchMany: 32752}
assert all(ctypes.sizeof(struct) == size for struct, size in SIZES.items())


class GroupFlag(enum.IntFlag):
    """What `Group.flags` holds."""

    MAXIMIZE = 1
    DECOUPLED = 2
    AMSGRAD = 4
    NESTEROV = 8
    NO_BIAS_CORRECTION = 16
    STOCHASTIC = 32
    ALWAYS_ADAPT = 64
    UNSCALE = 128
    NO_GRAD_AVERAGING = 256
    LR_IS_F64 = 512


class Feature(enum.IntFlag):
    """What a kernel is compiled with; the fewer, the fewer registers."""

    AMSGRAD = 1
    COPY = 2
    STOCHASTIC = 4
    UNSCALE = 8


_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16

PAIRS: dict[tuple[torch.dtype, torch.dtype, torch.dtype], int] = {
    (_F32, _F32, _F32): 0,
    (_F32, _BF16, _F32): 1,
    (_BF16, _BF16, _BF16): 2,
    (_F16, _F16, _F16): 3,
    (_F32, _F16, _F32): 4,
    (_BF16, _BF16, _F32): 5,
    (_F16, _F16, _F32): 6,
    (_BF16, _F32, _F32): 7,
}
"""Number of the kernel's body by the types of a parameter, its gradient and its state."""
