"""The kernels' numbers: 16-bit formats, random bits, rounding by chance, and moments of one byte."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import diagnose.kernels
import numpy as np
import pytest
import torch
from diagnose.kernels._structs import Group, GroupFlag
from diagnose.kernels.adamw_8bit import BLOCK_ELEMENTS, code_values
from diagnose.kernels.base import Kernel, Settings
from emulated import HEADER, EmulatedDevice
from emulated_table import EmulatedTable, Tensors

from diagnose.core.plugins import discover

KERNELS = discover(diagnose.kernels, Kernel)
FORMATS = EmulatedDevice(folder=HEADER.parent)


def pointer(array: Any) -> ctypes.c_void_p:
    """The address of an array as an argument of a kernel."""
    return ctypes.c_void_p(array.ctypes.data)


def some_floats() -> np.ndarray:
    """Bit patterns of every exponent, and the places where rounding turns."""
    random = np.random.Generator(np.random.PCG64(0))
    patterns = random.integers(0, 2**32, 2**19, np.uint32)
    near_f16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near_bf16 = np.arange(2**16, dtype=np.uint32) << 16
    turns = [
        base + delta for base in (near_f16, near_bf16) for delta in (0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000)
    ]
    floats = np.concatenate([patterns, *turns]).astype(np.uint32).view(np.float32)
    return np.ascontiguousarray(floats[: floats.size // 256 * 256])


def test_every_half_widens_to_what_numpy_makes_of_it() -> None:
    halves, found = np.arange(2**16, dtype=np.uint16), np.zeros(2**16, np.float32)
    FORMATS.launch("formats", "widen_f16", 256, 256, (pointer(halves), pointer(found)))
    np.testing.assert_array_equal(found, halves.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("entry, dtype", [("narrow_f16", torch.float16), ("narrow_bf16", torch.bfloat16)])
def test_floats_are_rounded_to_the_nearest_as_torch_rounds_them(entry: str, dtype: torch.dtype) -> None:
    floats = some_floats()
    found = np.zeros(floats.size, np.uint16)
    FORMATS.launch("formats", entry, floats.size // 256, 256, (pointer(floats), pointer(found)))
    ours = torch.from_numpy(found.view(np.int16)).view(dtype)
    expected = torch.from_numpy(floats).to(dtype)
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int16), expected[~nan].view(torch.int16))


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFFFFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_random_bits_are_those_of_the_generators_authors(
    counter: tuple[int, ...], key: int, expected: tuple[int, ...]
) -> None:
    found = np.zeros(4, np.uint32)
    args = (pointer(np.array(counter, np.uint32)), ctypes.c_uint64(key), pointer(found))
    FORMATS.launch("formats", "four_words", 1, 256, args)
    assert tuple(found.tolist()) == expected


@pytest.mark.parametrize("base", (0.0, 0.5, 0.9, 0.999, 0.99999))
def test_powers_are_those_of_the_library_to_the_last_digits(base: float) -> None:
    exponents = np.concatenate([np.arange(200), 2 ** np.arange(24), [16777215] * 32]).astype(np.uint64)
    found = np.zeros(256, np.float64)
    FORMATS.launch("formats", "powers", 1, 256, (ctypes.c_double(base), pointer(exponents), pointer(found)))
    np.testing.assert_allclose(found, base ** exponents.astype(np.float64), rtol=1e-8, atol=1e-300)


def stochastic(
    params: torch.Tensor, grads: torch.Tensor, *, seed: int, grid: int = 2, step: int = 0
) -> None:
    """A step of SGD at learning rate 1, rounded by chance."""
    table = EmulatedTable([{"p": params, "g": grads}], [Group(lr=1.0, flags=GroupFlag.STOCHASTIC)])
    table.control.seed, table.steps[:] = seed, step
    table.run(EmulatedDevice(grid), KERNELS["sgd"], grid=grid)


def test_rounding_by_chance_keeps_the_mean_and_takes_a_neighbour() -> None:
    size = 40000
    # A step of 3/8 of the gap between two numbers: to the nearest it would be lost for ever.
    params = torch.full((size,), 1.0, dtype=torch.bfloat16)
    step = -3 / 8 * 2**-7
    stochastic(params, torch.full((size,), -step, dtype=torch.bfloat16).neg(), seed=1)
    assert set(params.tolist()) == {1.0, 1.0 + 2**-7}
    # Five standard deviations of a binomial share.
    assert abs((params > 1.0).double().mean().item() - 3 / 8) < 5 * (3 / 8 * 5 / 8 / size) ** 0.5


def test_rounding_by_chance_depends_on_seed_step_and_element_alone() -> None:
    def rounded(*, offset: int = 0, **how: Any) -> torch.Tensor:
        whole = torch.full((20000 + 8,), 1.0, dtype=torch.bfloat16)
        params = whole[offset : offset + 20000]
        stochastic(params, torch.full((20000,), 2**-10, dtype=torch.bfloat16), **how)
        return params.clone()

    usual = rounded(seed=5)
    assert torch.equal(rounded(seed=5, grid=5), usual)
    for offset in (1, 3, 6):
        assert torch.equal(rounded(seed=5, offset=offset), usual)
    assert not torch.equal(rounded(seed=6), usual)
    assert not torch.equal(rounded(seed=5, step=1), usual)


def test_rounding_by_chance_moves_no_bit_between_neighbouring_elements() -> None:
    params = torch.full((32768,), 1.0, dtype=torch.bfloat16)
    stochastic(params, torch.full((32768,), 2**-8, dtype=torch.bfloat16).neg(), seed=9)
    up = (params > 1.0).double() - 0.5
    for distance in (1, 2, 3, 4, 7, 8, 9, 256):
        together = (up[:-distance] * up[distance:]).mean().item() * 4
        assert abs(together) < 5 / 32768**0.5, f"elements {distance} apart are rounded alike or opposed"


@pytest.mark.parametrize("name", ("adamw", "adamw-8bit", "lamb", "lion", "sgd"))
def test_each_kernel_rounds_to_the_neighbours_of_what_it_computes_in_fp32_by_their_distances(
    name: str,
) -> None:
    size, ends = 40000, []
    for dtype, flags in ((torch.float32, 0), (torch.bfloat16, GroupFlag.STOCHASTIC)):
        row = bytes_row(size, (dtype, dtype), 0)
        if name != "adamw-8bit":
            names = {"sgd": ("p", "g"), "lion": ("p", "g", "m")}.get(name, ("p", "g", "m", "v"))
            row = {each: torch.zeros(size, dtype=dtype) for each in names}
        row["p"].fill_(1.0)
        row["g"].fill_(1.0)
        table = EmulatedTable([row], [Group(lr=0.0022, beta1=0.9, beta2=0.9, eps=1e-6, flags=flags)])
        table.run(EmulatedDevice(), KERNELS[name])
        ends.append(row["p"].double())
    (exact,) = set(ends[0].tolist())
    above, below = np.ceil(exact * 2**8) / 2**8, np.floor(exact * 2**8) / 2**8
    assert below < exact < above
    assert set(ends[1].tolist()) == {below, above}
    share = (exact - below) * 2**8
    # Five standard deviations of a binomial share.
    assert abs((ends[1] == above).double().mean() - share) < 5 * (share * (1 - share) / size) ** 0.5


def test_neighbouring_parameters_and_steps_throw_dice_of_their_own() -> None:
    def rounded(dice: int, step: int) -> torch.Tensor:
        row = {"p": torch.ones(20000, dtype=torch.bfloat16)}
        row["g"] = torch.full_like(row["p"], 2**-9)
        table = EmulatedTable([row], [Group(lr=1.0, flags=GroupFlag.STOCHASTIC)])
        table.structs[0].dice, table.steps[:] = dice, step
        table.run(EmulatedDevice(), KERNELS["sgd"])
        return (row["p"] < 1).double() - 0.5

    thrown = [rounded(dice, step) for dice, step in ((0, 0), (0, 1), (1, 0), (2**32 - 1, 0), (0, 2**20))]
    for one in range(len(thrown)):
        for other in range(one):
            together = (thrown[one] * thrown[other]).mean().item() * 4
            assert abs(together) < 5 / 20000**0.5


def bytes_row(size: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int, *, offset: int = 0) -> Tensors:
    """A parameter whose moments are codes, none set yet."""
    torch.manual_seed(seed)
    num_blocks = -(-size // BLOCK_ELEMENTS)
    p, g = ((torch.randn(size + offset) * 0.5).to(dtype)[offset:] for dtype in dtypes)
    codes = {name: torch.zeros(size + offset, dtype=torch.uint8)[offset:] for name in ("m", "v")}
    return {"p": p, "g": g, **codes, "v_max": torch.zeros(num_blocks), "v_scales": torch.zeros(num_blocks)}


def decoded(row: Tensors) -> dict[str, np.ndarray]:
    """The moments that codes and scales stand for, in float64."""
    spread = {
        name: row[name].double().numpy().repeat(BLOCK_ELEMENTS)[: row["p"].numel()]
        for name in ("v_max", "v_scales")
    }
    m = code_values(signed=True)[row["m"].numpy()].astype(np.float64) * spread["v_max"]
    root = code_values(signed=False)[row["v"].numpy()].astype(np.float64) * spread["v_scales"]
    return {"m": m, "v": np.square(root)}


def blockwise_largest(x: np.ndarray) -> np.ndarray:
    """For each element the largest magnitude in its block."""
    starts = np.arange(0, x.size, BLOCK_ELEMENTS)
    return np.maximum.reduceat(np.abs(x), starts).repeat(BLOCK_ELEMENTS)[: x.size]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_moments_of_one_byte_follow_the_reference_within_a_code(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    kernel = KERNELS["adamw-8bit"]
    sizes = ((1, 0), (255, 0), (256, 0), (257, 1), (2048, 0), (2049, 0), (20001, 3))
    rows = [bytes_row(size, dtypes, size, offset=offset) for size, offset in sizes]
    flags = int(GroupFlag.DECOUPLED)
    table = EmulatedTable(
        rows, [Group(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, flags=flags)]
    )
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtypes[0]]
    for step in range(1, 5):
        before = [
            {"p": row["p"].double().numpy(), "g": row["g"].double().numpy(), **decoded(row)} for row in rows
        ]
        table.run(EmulatedDevice(step), kernel)
        for row, arrays in zip(rows, before, strict=True):
            with_ = Settings(
                step=step, lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, flags=flags
            )
            expected = kernel.reference(arrays, with_)
            np.testing.assert_allclose(
                row["p"].double().numpy(),
                expected["p"],
                rtol=kernel.tolerance["rtol"] + rounding,
                atol=kernel.tolerance["atol"],
            )
            found = decoded(row)
            root, expected_root = np.sqrt(found["v"]), np.sqrt(expected["v"])
            for ours, theirs, part in (
                (found["m"], expected["m"], 2.0**-5),
                (root, expected_root, 2.0**-6),
            ):
                # Half a code's distance: in parts of the number, or of the block's largest.
                allowed = np.abs(theirs) * part + 2.0**-12 * blockwise_largest(theirs) * 1.04 + 1e-12
                assert (np.abs(ours - theirs) <= allowed).all()
            assert (found["v"][expected["v"] > 0] > 0).all(), "no divisor becomes 0"
            row["g"].copy_(torch.randn(row["g"].numel()))


@pytest.mark.parametrize("seed, grid", [(0, 3), (5, 1), (900, 7)])
def test_moments_of_one_byte_have_the_bits_that_were_written_down(seed: int, grid: int) -> None:
    row = bytes_row(20001, (torch.float32, torch.float32), 0)
    for name, factor in (("p", 7919), ("g", 104729)):
        row[name].copy_((torch.arange(20001) * factor % 8191 - 4095).float() / 2048)
    table = EmulatedTable([row], [Group(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6)])
    for _ in range(3):
        table.run(EmulatedDevice(seed), KERNELS["adamw-8bit"], grid=grid)
    digest = hashlib.sha256(b"".join(row[name].numpy().tobytes() for name in sorted(row)))
    assert digest.hexdigest()[:16] == "751b8180a6c9d171"


def dynamic_map(*, signed: bool) -> np.ndarray:
    """The codes of bitsandbytes' dynamic quantisation, for comparison (create_dynamic_map)."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade + 1 if signed else 2 ** (decade + 1) + 1
        edges = np.linspace(0.1, 1, count)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means, *(-means if signed else ())]
    return np.sort(values)


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each number's nearest among the values, of which the last stands for the block's largest number."""
    values = np.sort(values.astype(np.float64))
    scale = blockwise_largest(x) / values.max()
    right = np.searchsorted(values, x / scale).clip(1, values.size - 1)
    closer = np.where(x / scale - values[right - 1] < values[right] - x / scale, right - 1, right)
    return values[closer] * scale


def test_codes_lose_little_more_than_a_table_of_as_many_values() -> None:
    random = np.random.Generator(np.random.PCG64(3))
    # Neighbours of very different size, as moments are.
    m = random.standard_normal(256 * 200) * 10 ** random.uniform(-2, 0, 256 * 200)
    ours = nearest(m, code_values(signed=True))
    theirs = nearest(m, dynamic_map(signed=True))
    assert np.std(ours - m) <= 1.25 * np.std(theirs - m)
    # The root of v divides: what counts is how far it is off in parts of itself.
    root = np.abs(m)
    ours = nearest(root, code_values(signed=False))
    theirs = np.sqrt(nearest(np.square(root), dynamic_map(signed=False)))
    assert np.std(ours / root) <= np.std(theirs / root)


def test_a_gradient_that_is_not_finite_spoils_its_block_and_no_other() -> None:
    row = bytes_row(1000, (torch.float32, torch.float32), 1)
    table = EmulatedTable([row], [Group(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6)])
    row["g"][300] = float("nan")
    table.run(EmulatedDevice(), KERNELS["adamw-8bit"])
    assert row["p"].isnan().nonzero().flatten().tolist() == [300], "at first only the element itself"
    row["g"].fill_(1.0)
    table.run(EmulatedDevice(), KERNELS["adamw-8bit"])
    assert row["p"].isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_codes_reach_from_the_finest_step_to_the_top() -> None:
    for signed, finest, top in ((True, 2.0**-11, 31 / 32), (False, 2.0**-12, 63 / 64)):
        values = code_values(signed=signed)
        assert len(set(values.tolist())) == 256 - signed, "0 has two signs"
        assert values.max() == np.float32(top)
        assert values[1] == finest
