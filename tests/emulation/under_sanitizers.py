"""Runs libraries of sanitized kernels over tensors of odd sizes at odd places, each in memory of its own.

    LD_PRELOAD=libasan.so python under_sanitizers.py PAIRS entry=library ...

Needs no torch, whose own allocations would take minutes to be watched. Any finding ends the process.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]

ROW = np.dtype([*((name, "u8") for name in ("p", "g", "m", "v", "v_max", "copy", "v_scales")),
                ("count", "i8"), ("group", "i4"), ("pair", "i4"), ("flags", "i4"), ("first_chunk", "i4"),
                ("num_chunks", "i4"), ("zero", "i4", 3)])  # fmt: skip
CHUNK = np.dtype([("start", "i8"), ("row", "i4"), ("count", "i4")])
GROUP = np.dtype([*((name, "f8") for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
                  ("lr_tensor", "u8"), ("flags", "u4"), ("zero", "u4", 3)])  # fmt: skip
LAUNCH = np.dtype([*((name, "u8") for name in ("rows", "chunks", "groups", "steps", "control", "workspace",
                                               "grad_scale", "found_inf", "clip_coef", "outcome")),
                   *((name, "i4") for name in ("num_rows", "num_large", "num_small", "first_told")),
                   ("max_norm", "f4"), ("clip_epsilon", "f4"),
                   ("num_told", "i4"), ("num_group_words", "i4"), ("told", "u8", 498)])  # fmt: skip

SIZES = (1, 3, 255, 257, 1023, 2048, 2049, 4097, 16390)
BYTES = {
    0: (4, 4, 4),
    1: (4, 2, 4),
    2: (2, 2, 2),
    3: (2, 2, 2),
    4: (4, 2, 4),
    5: (2, 2, 4),
    6: (2, 2, 4),
    7: (2, 4, 4),
}
AMSGRAD, DECOUPLED, STOCHASTIC, UNSCALE = 4, 2, 32, 128


def allocated(num_bytes: int, offset: int = 0) -> int:
    """Zeros that end where the allocation ends, so that the next byte is another's."""
    address = LIBC.malloc(num_bytes + offset)
    ctypes.memset(address, 0, num_bytes + offset)
    return int(address) + offset


def run(entry: str, function: object, pairs: tuple[int, ...]) -> None:
    """One launch over all sizes and offsets."""
    quantized = entry == "adamw_8bit"
    cases = [(pair, size, offset) for pair in pairs for size in SIZES for offset in (0, 1, 3)]
    rows, large, small = np.zeros(len(cases), ROW), [], []
    for i, (pair, size, offset) in enumerate(cases):
        p, g, s = BYTES[pair]
        state = 1 if quantized else s
        rows[i]["p"], rows[i]["g"] = allocated(size * p, offset * p), allocated(size * g, offset * g)
        rows[i]["m"], rows[i]["v"] = (allocated(size * state, offset * state) for _ in range(2))
        num_scales = -(-size // 256)
        rows[i]["v_max"] = allocated(
            num_scales * 4 if quantized else size * s, 0 if quantized else offset * s
        )
        rows[i]["v_scales"] = allocated(num_scales * 4)
        rows[i]["copy"], rows[i]["flags"] = allocated(size * 2, offset * 2), 1 + i % 2
        rows[i]["count"], rows[i]["pair"] = size, pair
        if size > 2048:
            large += [(start, i, min(16384, size - start)) for start in range(0, size, 16384)]
        else:
            small.append((0, i, size))
    chunks = np.array([*large, *small], CHUNK)
    for i in range(len(cases)):
        mine = np.flatnonzero(chunks["row"] == i)
        rows[i]["first_chunk"], rows[i]["num_chunks"] = mine[0], mine.size
    groups = np.zeros(1, GROUP)
    groups[0] = (0.1, 0.9, 0.99, 1e-8, 0.1, 0, AMSGRAD | DECOUPLED | STOCHASTIC | UNSCALE, 0)
    launch = np.zeros(1, LAUNCH)
    launch["rows"], launch["chunks"], launch["groups"] = (
        rows.ctypes.data,
        chunks.ctypes.data,
        groups.ctypes.data,
    )
    launch["steps"], launch["control"] = allocated(4 * len(cases)), allocated(64)
    launch["workspace"] = allocated(8 * (2 * chunks.size + len(cases)))
    launch["outcome"], factor = allocated(16), np.full(1, 0.5, np.float32)
    launch["clip_coef"], launch["max_norm"] = factor.ctypes.data, 1.0
    launch["grad_scale"] = factor.ctypes.data
    launch["num_rows"], launch["num_large"], launch["num_small"] = len(cases), len(large), len(small)
    arguments = (ctypes.c_void_p * 1)(launch.ctypes.data)
    problem = function(ctypes.c_uint(3), ctypes.c_uint(256), arguments, ctypes.c_uint64(1))
    if problem is not None:
        sys.exit(f"{entry}: {problem.decode()}")


def main() -> None:
    """Runs what the command line names."""
    pairs = tuple(int(pair) for pair in sys.argv[1].split(","))
    for argument in sys.argv[2:]:
        entry, _, library = argument.partition("=")
        function = getattr(ctypes.CDLL(library), f"launch_{entry}")
        function.restype = ctypes.c_char_p
        run(entry, function, pairs)
    print("clean")


if __name__ == "__main__":
    main()
