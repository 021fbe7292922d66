"""The emulated GPU finds what it is there for: races, missed barriers, wrong addresses, wrong numbers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import diagnose.kernels
import pytest
import torch
from diagnose.kernels._structs import Group, GroupFlag
from diagnose.kernels.base import Kernel
from emulated import HEADER, KERNELS, EmulatedDevice, EmulationError, entries_of, library_path
from emulated_table import EmulatedTable

from diagnose.core.plugins import discover

FOUND = discover(diagnose.kernels, Kernel)
ONE_PAIR = {"PAIRS": 1, "FEATURES": 0}

CHUNK_SUM_READ = "    __syncthreads();  // what the call before left has been read\n"
CHUNK_SUM_WRITTEN = "shared[threadIdx.x / LANES] = x;\n    __syncthreads();\n"
SCALARS_READ = "        __syncthreads();  // the scalars of the item before have been read\n"
SCALARS_WRITTEN = "            }\n        }\n        __syncthreads();\n"

# Kernel, file, what stands in it, what a slip would have put there.
SLIPS = {
    "sum-overwritten": ("norm", "_table.cuh", CHUNK_SUM_READ, ""),
    "sum-read-early": ("norm", "_table.cuh", CHUNK_SUM_WRITTEN, CHUNK_SUM_WRITTEN.splitlines()[0] + "\n"),
    "sum-of-too-few-blocks": ("norm", "_table.cuh", "== gridDim.x - 1", "== gridDim.x - 2"),
    "scalars-overwritten": ("sgd", "_update.cuh", SCALARS_READ, ""),
    "scalars-read-early": ("sgd", "_update.cuh", SCALARS_WRITTEN, "            }\n        }\n"),
    "gradient-taken-for-aligned": (
        "sgd",
        "_update.cuh",
        "| (reinterpret_cast<u64>(row.g)",
        "| 0 * (reinterpret_cast<u64>(row.g)",
    ),
    "tail-too-long": ("sgd", "_update.cuh", "k < count; k += lanes) op.", "k <= count; k += lanes) op."),
    "dampening-forgotten": ("sgd", "sgd.cu", "fmaf(keep, g[k], m", "fmaf(1.0f, g[k], m"),
    "steps-not-counted": ("sgd", "_table.cuh", "launch.steps[row] += 1.0f", "launch.steps[row] += 0.0f"),
    # Slower, but right: all is tail.
    "none": ("sgd", "_update.cuh", "max(count - head, 0) / V", "max(count - head, 0) / V * 0"),
}


def outcome(stem: str, folder: Path, seed: int) -> bytes:
    """The bits of tensors, and of what lies around them, after three steps of rows that differ in all."""
    torch.manual_seed(0)
    sizes = (5, 40000, 2048, 3000, 300, 7, 9000, 60)
    wholes = [{name: torch.randn(size + 9) for name in ("p", "g", "m")} for size in sizes]
    rows = [
        {name: whole[4 * (name != "g") :][: sizes[i]] for name, whole in tensors.items()}
        for i, tensors in enumerate(wholes)
    ]
    rows[1]["g"] = wholes[1]["g"][1:40001]  # aligned otherwise than the rest of its row
    groups = [Group(lr=0.1 / (i + 1), beta1=0.9, beta2=0.3, flags=GroupFlag.NESTEROV) for i in range(8)]
    table = EmulatedTable(rows, groups, of=range(8))
    device, entry = EmulatedDevice(seed, folder=folder), FOUND[stem].entries[0]
    defines, found = ONE_PAIR if stem == "sgd" else {}, []
    for grid in (1, 2, 4):
        device.launch(stem, entry, grid, 256, (table.launch_struct(),), defines)
        found += [table.outcome.tobytes(), table.steps.tobytes()]
    found += [whole.numpy().tobytes() for tensors in wholes for whole in tensors.values()]
    return b"".join(found)


def slipped(slip: str, tmp_path: Path) -> tuple[str, Path]:
    """The kernel's name and a folder of sources with the slip in them."""
    stem, name, right, wrong = SLIPS[slip]
    for path in (*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")):
        shutil.copy(path, tmp_path)
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert right in text, "the slip is in what the file says today"
    (tmp_path / name).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    return stem, tmp_path


def is_noticed(stem: str, folder: Path) -> bool:
    """Whether some order of threads gives other bits than the right sources, or an error."""
    expected = outcome(stem, KERNELS, seed=0)
    try:
        return any(outcome(stem, folder, seed=seed) != expected for seed in range(12))
    except EmulationError:
        return True


@pytest.mark.parametrize("slip", [name for name in SLIPS if name != "none"])
def test_a_slip_in_the_source_is_noticed(slip: str, tmp_path: Path) -> None:
    stem, folder = slipped(slip, tmp_path)
    assert is_noticed(stem, folder)


def test_what_is_no_slip_is_not_noticed(tmp_path: Path) -> None:
    stem, folder = slipped("none", tmp_path)
    assert not is_noticed(stem, folder)


STUCK = """
#include "_table.cuh"
extern "C" __global__ void __launch_bounds__(THREADS) half_a_barrier(float* out) {
    if (threadIdx.x < 128) __syncthreads();
    out[threadIdx.x] = static_cast<float>(warp_sum(1.0));
    __syncthreads();
}
extern "C" __global__ void __launch_bounds__(THREADS) half_a_shuffle(float* out) {
    if (threadIdx.x % 32 < 16) out[threadIdx.x] = static_cast<float>(warp_sum(1.0));
    __syncthreads();
}
"""


@pytest.mark.parametrize(
    "entry, message",
    [("half_a_barrier", "wait at different barriers: lines"), ("half_a_shuffle", "no thread can go on")],
)
def test_threads_that_wait_for_each_other_for_ever_are_named(
    entry: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "stuck.cu").write_text(STUCK, encoding="utf-8")
    out = torch.zeros(256)
    with pytest.raises(EmulationError, match=message):
        EmulatedDevice(folder=tmp_path).launch("stuck", entry, 1, 256, (ctypes.c_void_p(out.data_ptr()),))


# Of each kernel the pairs that go different ways through it: all in fp32, all in 16 bits, or mixed. Lion
# goes the way of SGD.
PAIRS_TO_WATCH = {
    "adamw": (0, 2),
    "adamw-8bit": (1,),
    "lamb": (1,),
    "norm": (0, 2),
    "scale": (0, 2),
    "sgd": (0, 2),
}


def sanitized(pairs: str, libraries: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    """Runs libraries in a process of their own that the sanitizers watch."""
    asan = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    environment = {**os.environ, "LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    script = HEADER.parent / "under_sanitizers.py"
    command = [
        sys.executable,
        str(script),
        pairs,
        *(f"{entry}={path}" for entry, path in libraries.items()),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("adamw", "norm") else pytest.param(name, marks=pytest.mark.extended)
        for name in PAIRS_TO_WATCH
    ],
)
def test_no_address_and_no_operation_of_a_step_is_undefined(name: str) -> None:
    kernel, pairs = FOUND[name], PAIRS_TO_WATCH[name]
    depends = "PAIRS" in next(reversed(kernel.variants.values()))
    defines = (("PAIRS", sum(1 << pair for pair in pairs)),) if depends else ()
    library = library_path(kernel.stem, defines, sanitized=True)
    done = sanitized(",".join(map(str, pairs)), dict.fromkeys(kernel.entries, library))
    assert done.stdout == "clean\n", done.stderr[-3000:]


def test_a_tail_that_is_too_long_is_seen_by_the_sanitizers(tmp_path: Path) -> None:
    _, folder = slipped("tail-too-long", tmp_path)
    library = library_path("sgd", (("FEATURES", 0), ("PAIRS", 1)), sanitized=True, folder=folder)
    done = sanitized("0", {"sgd": library})
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in FOUND if name != "patch"])
def test_no_address_and_no_operation_of_a_kernel_is_undefined(name: str) -> None:
    kernel = FOUND[name]
    library = library_path(kernel.stem, sanitized=True)
    done = sanitized("0,1,2,3,4,5,6,7", dict.fromkeys(kernel.entries, library))
    assert done.stdout == "clean\n", done.stderr[-3000:]


def test_a_kernel_names_the_entries_that_its_source_defines() -> None:
    for kernel in FOUND.values():
        text = (KERNELS / f"{kernel.stem}.cu").read_text(encoding="utf-8")
        assert sorted(entries_of(text)) == sorted(kernel.entries)
