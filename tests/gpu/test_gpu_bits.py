"""What a GPU computes is, bit for bit, what the emulation on a CPU does: its tests then speak for both."""

from __future__ import annotations

import shutil

import pytest
import torch
from diagnose.kernels._structs import PAIRS, Feature, GroupFlag
from diagnose.kernels.adamw_8bit import BLOCK_ELEMENTS
from diagnose.kernels.base import Kernel

from tests import test_kernels_numerics as on_cpu
from tests.emulated import EmulatedDevice
from tests.emulated_table import EmulatedTable, Tensors, pair_of
from tests.gpu.lined_up import brought_back, brought_to, table_over
from tests.test_kernels_numerics_bits import GOLDEN, bits, exact_rows

KERNELS = on_cpu.KERNELS
PAIR_IDS = on_cpu.PAIR_IDS


def stepped(place: torch.device, name: str, *, offset: int = 0, **defines: int) -> str:
    """The bits after two steps on a device, of the rows whose hash is written down."""
    kernel = KERNELS[name]
    rows = brought_to(place, exact_rows(kernel, offset=offset))
    table = table_over(rows, [on_cpu.group_of(on_cpu.settings_of(kernel))], seed=42)
    for _ in range(2):
        for entry in kernel.entries:
            table.run(kernel.name, entry, defines, clip_epsilon=1e-6, max_norm=1.0)
    return bits(brought_back(rows))


@pytest.mark.parametrize("name", on_cpu.UPDATES)
def test_the_bits_are_those_written_down_for_the_cpu(name: str, place: torch.device) -> None:
    assert stepped(place, name) == GOLDEN[name]


@pytest.mark.parametrize("name", on_cpu.UPDATES)
def test_alignment_changes_no_bit(name: str, place: torch.device) -> None:
    assert {stepped(place, name, offset=offset) for offset in (1, 3)} == {GOLDEN[name]}


def both(
    place: torch.device, kernel: Kernel, rows: list[Tensors], flags: int, **defines: int
) -> tuple[list[Tensors], list[Tensors]]:
    """Two steps on the device with these defines, and in the emulation without any."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the emulation")
    ours = brought_to(place, rows)
    group = on_cpu.group_of(on_cpu.settings_of(kernel, flags=flags))
    table = table_over(ours, [group], seed=7)
    emulated = EmulatedTable(rows, [group])
    emulated.control.seed = 7
    for _ in range(2):
        emulated.run(EmulatedDevice(1), kernel)
        for entry in kernel.entries:
            table.run(kernel.name, entry, defines, clip_epsilon=1e-6, max_norm=1.0)
    return brought_back(ours), rows


@pytest.mark.parametrize("dtypes", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("name", on_cpu.UPDATES)
def test_a_kernel_compiled_for_one_pair_of_dtypes_gives_the_emulations_bits(
    name: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], place: torch.device
) -> None:
    kernel = KERNELS[name]
    rows = [
        on_cpu.row_of(kernel, size, dtypes, seed=size, offset=offset)
        for size in (0, 1, 3, 1023, 4097, 40_000)
        for offset in (0, 1)
    ]
    flags = on_cpu.settings_of(kernel).flags
    ours, theirs = both(place, kernel, rows, flags, PAIRS=1 << pair_of(rows[1]), FEATURES=0)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtypes", [pair for pair in PAIRS if pair[0] is torch.bfloat16])
def test_rounding_by_chance_throws_the_same_dice(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], place: torch.device
) -> None:
    kernel = KERNELS["adamw"]
    rows = [on_cpu.row_of(kernel, size, dtypes, seed=size) for size in (5, 1023, 4097, 20_000)]
    flags = int(GroupFlag.STOCHASTIC | GroupFlag.DECOUPLED)
    defines = {"PAIRS": 1 << pair_of(rows[0]), "FEATURES": int(Feature.STOCHASTIC)}
    assert_same_bits(*both(place, kernel, rows, flags, **defines))


@pytest.mark.parametrize("copy", [torch.bfloat16, torch.float16])
def test_the_low_precision_copy_of_a_master_is_the_emulations(
    copy: torch.dtype, place: torch.device
) -> None:
    kernel = KERNELS["adamw"]
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    rows = [on_cpu.row_of(kernel, size, dtypes, seed=size) for size in (5, 1023, 4097)]
    for row in rows:
        row["copy"] = torch.zeros_like(row["p"], dtype=copy)
    ours, theirs = both(place, kernel, rows, int(GroupFlag.DECOUPLED))
    assert_same_bits(ours, theirs)
    assert all(torch.equal(row["copy"], row["p"].to(copy)) for row in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_one_byte_are_the_emulations(dtype: torch.dtype, place: torch.device) -> None:
    kernel = KERNELS["adamw-8bit"]
    rows = []
    for size in (1, 255, 257, 4097, 40_000):
        row = {name: on_cpu.random_tensor(size, dtype, size + len(name)) for name in ("p", "g")}
        row |= {name: torch.zeros(size, dtype=torch.uint8) for name in ("m", "v")}
        row |= {name: torch.zeros(-(-size // BLOCK_ELEMENTS)) for name in ("v_max", "v_scales")}
        rows.append(row)
    defines = {"PAIRS": 1 << pair_of(rows[0]), "FEATURES": 0}
    assert_same_bits(*both(place, kernel, rows, int(GroupFlag.DECOUPLED), **defines))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_the_emulations_to_the_bit(dtype: torch.dtype, place: torch.device) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the emulation")
    rows = [
        {"g": on_cpu.random_tensor(size, dtype, size, offset=offset)}
        for size in (0, 1, 3, 1023, 4097, 100_000)
        for offset in (0, 1)
    ]
    group = on_cpu.group_of(on_cpu.settings_of(KERNELS["norm"]))
    emulated = EmulatedTable(rows, [group])
    emulated.run(EmulatedDevice(3), KERNELS["norm"])
    outcome_4 = torch.zeros(4, device=place)
    ours = brought_to(place, rows)
    table = table_over(ours, [group])
    table.run("norm", "gradient_norm", outcome_4=outcome_4, max_norm=1.0)
    assert outcome_4.tolist() == emulated.outcome.tolist()


def assert_same_bits(ours: list[Tensors], theirs: list[Tensors]) -> None:
    """Of all that the rows hold."""
    different = [
        (index, name)
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        for name in other
        if not torch.equal(as_bytes(mine[name]), as_bytes(other[name]))
    ]
    assert different == []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """So that NaN equals itself and -0 is not 0."""
    return tensor.contiguous().view(torch.uint8)
