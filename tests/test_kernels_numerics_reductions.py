"""The kernels around the update: norm, scaling, patches; and what each row has of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import mmap
import os
from collections.abc import Sequence

import diagnose.kernels
import numpy as np
import pytest
import torch
from diagnose.kernels._structs import PATCH_VALUES, Group, GroupFlag, Patch, PatchMany
from diagnose.kernels.base import Kernel, Settings
from emulated import EmulatedDevice
from emulated_table import EmulatedTable
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.core.plugins import discover

KERNELS = discover(diagnose.kernels, Kernel)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 33, 1023, 2048, 2049, 4097, 16384 + 5)


def gradients(sizes: Sequence[int], dtype: torch.dtype, *, offset: int = 0) -> list[torch.Tensor]:
    """Normal numbers, each tensor `offset` elements behind an aligned address."""
    random = np.random.Generator(np.random.PCG64(len(sizes)))
    found = []
    for size in sizes:
        numbers = torch.from_numpy(np.asarray(random.standard_normal(size), np.float32).reshape(-1))
        whole = torch.empty(size + offset + 16, dtype=dtype)
        skip = -whole.data_ptr() % 16 // whole.element_size() + offset
        found.append(whole[skip : skip + size].copy_(numbers))
    return found


def table_of(grads: Sequence[torch.Tensor]) -> EmulatedTable:
    """A table of gradients alone."""
    return EmulatedTable([{"g": grad} for grad in grads])


def outcome_of(
    grads: Sequence[torch.Tensor], *, seed: int = 0, grid: int = 3, scale: float | None = None
) -> np.ndarray:
    """What the norm kernel finds."""
    table = table_of(grads)
    fields = {}
    if scale is not None:
        scales = np.array([scale], np.float32)
        fields["grad_scale"] = scales.ctypes.data
    table.run(EmulatedDevice(seed), KERNELS["norm"], grid=grid, **fields)
    assert bytes(table.control)[:16] == bytes(16), "the counters are ready for the next launch"
    return table.outcome


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_and_its_factor_are_those_of_the_reference(dtype: torch.dtype) -> None:
    kernel = KERNELS["norm"]
    grads = gradients(SIZES, dtype)
    expected = kernel.reference({"g": torch.cat(grads).double().numpy()}, Settings())
    norm, coef, found_inf, _ = outcome_of(grads)
    np.testing.assert_allclose((norm, coef), (expected["norm"], expected["clip_coef"]), **kernel.tolerance)
    assert found_inf == 0


def test_the_factor_has_the_bits_of_torchs_for_the_same_norm() -> None:
    table = table_of(gradients(SIZES, torch.float32))
    for max_norm in (0.1, 0.7, 1.0, 3.3, 1e9):
        table.run(EmulatedDevice(), KERNELS["norm"], max_norm=max_norm)
        theirs = torch.clamp(max_norm / (torch.tensor(table.outcome[0]) + 1e-6), max=1.0)
        assert table.outcome[1] == theirs.item()


@pytest.mark.parametrize("value", (0.0, 1.0, 1e38, math.inf, math.nan))
def test_the_factor_without_a_limit_is_torchs_for_every_norm(value: float) -> None:
    table = table_of([torch.tensor([value])])
    table.run(EmulatedDevice(), KERNELS["norm"], max_norm=math.inf)
    theirs = torch.clamp(math.inf / (torch.tensor(table.outcome[0]) + 1e-6), max=1.0)
    np.testing.assert_equal(table.outcome[1], theirs.numpy())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    st.integers(1, 7),
    st.integers(0, 2**32),
    st.integers(0, 7),
)
def test_the_norm_has_the_same_bits_for_every_grid_order_and_alignment(
    sizes: list[int], grid: int, seed: int, offset: int
) -> None:
    usual = outcome_of(gradients(sizes, torch.float32))
    found = outcome_of(gradients(sizes, torch.float32, offset=offset), seed=seed, grid=grid)
    assert found.tobytes() == usual.tobytes()


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", (0, 5, 8))
def test_a_gradient_that_is_not_finite_is_found(index: int, dtype: torch.dtype, bad: float) -> None:
    grads = gradients([*SIZES[1:], 20000], dtype)
    grads[index][-1] = bad
    norm, coef, found_inf, _ = outcome_of(grads)
    expected = torch.nn.utils.get_total_norm([grad.float() for grad in grads]).item()
    assert (math.isnan(norm), math.isinf(norm)) == (math.isnan(expected), math.isinf(expected))
    assert math.isnan(coef) if math.isnan(expected) else coef == 0
    assert found_inf == 1


def test_the_norm_has_the_bits_that_were_written_down() -> None:
    grads = [(torch.arange(size) * 7919 % 8191 - 4095).float() / 2048 for size in SIZES]
    norm, coef, _, _ = outcome_of(grads)
    assert (float(norm).hex(), float(coef).hex()) == ("0x1.71eea40000000p+7", "0x1.6250480000000p-8")


def test_squares_beyond_fp32_are_not_taken_for_gradients_that_are_not_finite() -> None:
    _, _, found_inf, _ = outcome_of([torch.tensor([3e38, 1.0])])
    assert found_inf == 0


def test_the_norm_is_that_of_the_unscaled_gradients() -> None:
    grads = gradients((100, 3000), torch.float32)
    norm = outcome_of([grad * 1024 for grad in grads], scale=1024.0)[0]
    assert norm == pytest.approx(outcome_of(grads)[0], rel=1e-6)


def test_rows_without_a_gradient_count_nothing() -> None:
    grads = gradients((100, 3000, 5000), torch.float32)
    table = table_of(grads)
    table.structs[1].g = 0
    table.run(EmulatedDevice(), KERNELS["norm"])
    expected = torch.nn.utils.get_total_norm([grads[0], grads[2]]).item()
    assert table.outcome[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", (0, 1, 3))
def test_scaling_has_the_bits_of_torchs_clipping(offset: int, dtype: torch.dtype) -> None:
    grads = gradients(SIZES, dtype, offset=offset)
    expected = [(grad.float() * 0.3).to(dtype) for grad in grads]
    factor = np.array([0.3], np.float32)
    table_of(grads).run(EmulatedDevice(), KERNELS["scale"], clip_coef=factor.ctypes.data)
    for grad, theirs in zip(grads, expected, strict=True):
        assert torch.equal(grad, theirs)


def scale_what_may_only_be_read(factor: float) -> None:
    """Ends the process by SIGSEGV at the first write."""
    faulthandler.disable()  # the signal is what is expected
    page = mmap.mmap(-1, 1 << 16)
    grads = np.frombuffer(page, np.float32)
    table = table_of([torch.zeros(grads.size)])
    table.structs[0].g = grads.ctypes.data
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(grads.ctypes.data), ctypes.c_size_t(1 << 16), mmap.PROT_READ) == 0
    factors = np.array([factor], np.float32)
    table.run(EmulatedDevice(), KERNELS["scale"], clip_coef=factors.ctypes.data)


@pytest.mark.parametrize("factor, signal", [(1.0, 0), (0.5, 11), (math.nan, 11)])
def test_a_factor_of_one_writes_nothing(factor: float, signal: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            scale_what_may_only_be_read(factor)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal


@pytest.mark.parametrize("struct, defines", [(Patch, {}), (PatchMany, {"VALUES": 4092})])
def test_a_patch_writes_its_words_and_no_others(
    struct: type[ctypes.Structure], defines: dict[str, int]
) -> None:
    words = np.arange(3 * 600, dtype=np.uint64)
    before = words.copy()
    patch = struct(target=words.ctypes.data + 8, stride=3, count=500)
    for i in range(500):
        patch.values[i] = 2**63 + i
    EmulatedDevice(3).launch("patch", "patch", 2, 256, (patch,), defines)
    expected = before.copy()
    expected[1 : 1 + 3 * 500 : 3] = 2**63 + np.arange(500, dtype=np.uint64)
    assert (words == expected).all()
    assert PATCH_VALUES == 510


def adam_rows(sizes: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Rows of AdamW in fp32."""
    return [{name: torch.rand(size) for name in ("p", "g", "m", "v")} for size in sizes]


def test_a_step_with_infinite_gradients_writes_and_counts_nothing() -> None:
    rows = adam_rows((10, 5000))
    before = [{name: tensor.clone() for name, tensor in row.items()} for row in rows]
    for name in ("adamw", "sgd", "lion", "lamb"):
        table = EmulatedTable(rows, [Group(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8)])
        found_inf = np.ones(1, np.float32)
        table.run(EmulatedDevice(), KERNELS[name], found_inf=found_inf.ctypes.data)
        assert (table.steps == 0).all()
        assert bytes(table.control) == bytes(64)
    for row, old in zip(rows, before, strict=True):
        assert all(torch.equal(row[name], old[name]) for name in row)


def test_a_row_without_a_gradient_is_left_alone_and_its_steps_are_not_counted() -> None:
    rows = adam_rows((10, 5000, 300))
    before = [{name: tensor.clone() for name, tensor in row.items()} for row in rows]
    for name in ("adamw", "sgd", "lion", "lamb"):
        table = EmulatedTable(rows, [Group(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1)])
        table.structs[1].g = 0
        table.run(EmulatedDevice(), KERNELS[name])
        assert table.steps.tolist() == [1, 0, 1]
    assert all(torch.equal(rows[1][name], before[1][name]) for name in rows[1])
    assert not torch.equal(rows[0]["p"], before[0]["p"])


def test_each_row_has_the_steps_and_the_settings_of_its_own() -> None:
    sizes = (10, 5000, 300, 3000, 40)
    rows, alone = adam_rows(sizes), []
    groups = [Group(lr=0.1 / (i + 1), beta1=0.9, beta2=0.99, eps=1e-8) for i in range(2)]
    for i, row in enumerate(rows):
        copy = {name: tensor.clone() for name, tensor in row.items()}
        table = EmulatedTable([copy], [groups[i % 2]])
        table.steps[:] = 3 * i
        table.run(EmulatedDevice(), KERNELS["adamw"])
        alone.append(copy)
    table = EmulatedTable(rows, groups, of=[i % 2 for i in range(5)])
    table.steps[:] = [3 * i for i in range(5)]
    table.run(EmulatedDevice(), KERNELS["adamw"], grid=1)
    for row, copy in zip(rows, alone, strict=True):
        assert torch.equal(row["p"], copy["p"])


@pytest.mark.parametrize("dtype, flag", [(torch.float32, 0), (torch.float64, GroupFlag.LR_IS_F64)])
def test_a_learning_rate_on_the_device_is_read_in_every_step(dtype: torch.dtype, flag: int) -> None:
    lr = torch.tensor(0.5, dtype=dtype)
    rows = [{"p": torch.zeros(4), "g": torch.ones(4)}]
    table = EmulatedTable(rows, [Group(lr=7.0, lr_tensor=lr.data_ptr(), flags=flag)])
    for value in (0.5, 0.25):
        lr.fill_(value)
        table.run(EmulatedDevice(), KERNELS["sgd"])
    assert rows[0]["p"].tolist() == [-0.75] * 4


@pytest.mark.parametrize("offset", (0, 1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_divided_in_memory_and_the_step_goes_on_with_what_was_not_rounded(
    dtype: torch.dtype, offset: int
) -> None:
    grads = gradients(SIZES, dtype, offset=offset)
    expected = [(grad.float() / 3, (grad.float() / 3).to(dtype)) for grad in grads]
    rows = [{"p": torch.zeros(grad.numel() + offset)[offset:], "g": grad} for grad in grads]
    scale = np.array([3.0], np.float32)
    table = EmulatedTable(rows, [Group(lr=1.0, flags=GroupFlag.UNSCALE)])
    table.run(EmulatedDevice(), KERNELS["sgd"], grad_scale=scale.ctypes.data)
    for row, (used, stored) in zip(rows, expected, strict=True):
        assert torch.equal(row["p"], -used)
        assert torch.equal(row["g"], stored)


@pytest.mark.parametrize("copy", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("offset", (0, 1))
def test_the_copy_of_master_weights_is_the_weights_rounded(offset: int, copy: torch.dtype) -> None:
    rows = adam_rows((10, 5000))
    for row in rows:
        row["g"] = row["g"].to(copy)
        row["copy"] = torch.empty(row["p"].numel() + 1, dtype=copy)[offset:][: row["p"].numel()]
    for name in ("adamw", "sgd", "lion", "lamb"):
        table = EmulatedTable(rows, [Group(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8)])
        table.run(EmulatedDevice(), KERNELS[name])
        assert all(torch.equal(row["copy"], row["p"].to(copy)) for row in rows)


def test_elements_beyond_two_to_the_31_are_reached() -> None:
    start = 2**31 + 3 * 16384
    # Address space alone: what is not touched takes no memory.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    private_anonymous_noreserve = 0x2 | 0x20 | 0x4000
    num_bytes = (start + 16384) * 4
    row = EmulatedTable([{"p": torch.zeros(1), "g": torch.zeros(1)}])
    bases = {name: libc.mmap(None, num_bytes, 3, private_anonymous_noreserve, -1, 0) for name in ("p", "g")}
    views = {
        name: np.frombuffer((ctypes.c_float * 16384).from_address(base + 4 * start), np.float32)
        for name, base in bases.items()
    }
    views["g"][:] = 1
    row.structs[0].p, row.structs[0].g = bases["p"], bases["g"]
    row.structs[0].count = start + 16384
    row.chunks[0].start, row.chunks[0].count = start, 16384
    row.num_large, row.num_small = 1, 0
    row.groups[0] = Group(lr=0.5)
    row.run(EmulatedDevice(), KERNELS["sgd"])
    assert (views["p"] == -0.5).all()
    for base in bases.values():
        libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(num_bytes))
