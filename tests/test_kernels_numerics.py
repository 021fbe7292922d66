"""Every kernel of `kernels/`, run as it is on an emulated GPU, computes what its reference does."""

from __future__ import annotations

from typing import Any

import diagnose.kernels
import numpy as np
import pytest
import torch
from diagnose.kernels._structs import PAIRS, Group, GroupFlag
from diagnose.kernels.base import Arrays, Kernel, Settings
from emulated import EmulatedDevice
from emulated_table import EmulatedTable, Tensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diagnose.core.plugins import discover

KERNELS = discover(diagnose.kernels, Kernel)
UPDATES = ("adamw", "lamb", "lion", "sgd")
PAIR_IDS = [f"{p}-{g}-{s}".replace("torch.", "") for p, g, s in PAIRS]

# Below a warp's worth, a warp's small tensor, a block's large one, several chunks; and one more or less.
SIZES = (0, 1, 3, 33, 1023, 2048, 2049, 4097, 16384 + 5)

# Half a unit in the last place, and what the float32 computation may add where it rounds the other way.
RTOL = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
# Half of the least number above 0, likewise.
ATOL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}


def random_tensor(
    size: int, dtype: torch.dtype, seed: int, *, offset: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Normal numbers in a tensor that starts `offset` elements behind an aligned address."""
    numbers = np.random.Generator(np.random.PCG64(seed)).standard_normal(size, np.float32) * scale
    whole = torch.empty(size + offset + 16, dtype=dtype)
    skip = -whole.data_ptr() % 16 // whole.element_size() + offset
    view = whole[skip : skip + size]
    view.copy_(torch.from_numpy(numpy_f32(numbers)))
    return view


def numpy_f32(numbers: Any) -> Any:
    """As an array of fp32, also where there is one number or none."""
    return np.asarray(numbers, np.float32).reshape(-1)


def row_of(
    kernel: Kernel,
    size: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    seed: int,
    *,
    offset: int = 0,
    flags: int = 0,
) -> Tensors:
    """A parameter with the arrays that a kernel reads, as they are after some steps."""
    p, g, states = dtypes
    row = {}
    for number, name in enumerate(kernel.arrays):
        if name == "v_max" and not flags & GroupFlag.AMSGRAD:
            continue
        dtype = {"p": p, "g": g}.get(name, states)
        row[name] = random_tensor(size, dtype, 7 * seed + number, offset=offset, scale=0.5)
        if name in ("v", "v_max"):
            row[name].square_()
    return row


def wide(row: Tensors) -> Arrays:
    """The tensors as float64."""
    return {name: tensor.double().numpy().copy() for name, tensor in row.items()}


def group_of(with_: Settings) -> Group:
    """The settings as the kernels read them."""
    return Group(
        lr=with_.lr,
        beta1=with_.beta1,
        beta2=with_.beta2,
        eps=with_.eps,
        weight_decay=with_.weight_decay,
        flags=with_.flags,
    )


def settings_of(kernel: Kernel, **changes: Any) -> Settings:
    """Settings with which every part of the formula counts."""
    flags = {"adamw": GroupFlag.DECOUPLED, "sgd": GroupFlag.NESTEROV}.get(kernel.name, 0)
    named = {"step": 7, "lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "flags": int(flags)}
    betas = {"beta1": 0.9, "beta2": 0.25 if kernel.name == "sgd" else 0.999}
    return Settings(**{**named, **betas, **changes})


def slack(kernel: Kernel, row: Tensors, name: str, arrays: Arrays, with_: Settings, expected: Any) -> Any:
    """How far an element may be off beyond rounding, where the formula asks for it."""
    if name == "p" and kernel.name == "lion":
        # Of almost nothing the sign may be either.
        way = with_.beta1 * arrays["m"] + (1 - with_.beta1) * arrays["g"] * with_.clip_coef
        return np.where(np.abs(way) < 1e-6, 2 * with_.lr, 0.0)
    if name == "p" and kernel.name == "lamb" and row["m"].dtype is not torch.float32:
        # The second launch reads moments as they were stored: small ones of v in f16 have few digits.
        return 0.1 * np.abs(expected - arrays["p"])
    if name == "p" and kernel.name in ("adamw", "lamb"):
        # Sums are rounded in float32 as torch's are; where their parts nearly cancel, that is much.
        decay = 0.0 if kernel.name == "lamb" or with_.flags & GroupFlag.DECOUPLED else with_.weight_decay
        gradient = arrays["g"] * with_.clip_coef * (-1 if with_.flags & GroupFlag.MAXIMIZE else 1)
        parts = np.abs(gradient) + decay * np.abs(arrays["p"])
        gradient = gradient + decay * arrays["p"]
        moment = with_.beta1 * arrays["m"] + (1 - with_.beta1) * gradient
        off = parts / np.maximum(np.abs(gradient), 1e-30)
        off = off + (np.abs(arrays["m"]) + parts) / np.maximum(np.abs(moment), 1e-30)
        return off * 2.0**-21 * np.abs(expected - arrays["p"])
    return 0.0


def check(kernel: Kernel, rows: list[Tensors], before: list[Arrays], with_: Settings) -> None:
    """Compares what the rows hold with the reference."""
    for row, arrays in zip(rows, before, strict=True):
        if row["p"].numel() == 0:
            continue
        for name, expected in kernel.reference(arrays, with_).items():
            found, dtype = row[name].double().numpy(), row[name].dtype
            allowed = (kernel.tolerance["rtol"] + RTOL[dtype]) * np.abs(expected) + ATOL[dtype]
            allowed = allowed + kernel.tolerance["atol"]
            allowed = allowed + slack(kernel, row, name, arrays, with_, expected)
            worst = int(np.argmax(np.abs(found - expected) - allowed))
            assert abs(found[worst] - expected[worst]) <= allowed[worst], (
                f"{kernel.name}: {name}[{worst}] of {found.size} is {found[worst]}, not {expected[worst]}"
            )


@pytest.mark.parametrize("dtypes", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("name", UPDATES)
def test_a_kernel_computes_its_reference_for_every_size_alignment_and_dtype(
    name: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    kernel = KERNELS[name]
    # The root of a moment of LAMB's that f16 rounds to nothing is no divisor.
    eps = 1e-2 if name == "lamb" and dtypes[2] is torch.float16 else 1e-8
    with_ = settings_of(kernel, eps=eps)
    rows = [
        row_of(kernel, size, dtypes, seed=11 * size + offset, offset=offset)
        for size in SIZES
        for offset in (0, 1, 3)
    ]
    # As in a flat buffer of a wrapper, where only the gradient is a view at an odd place.
    rows.append({**row_of(kernel, 4097, dtypes, 5), "g": random_tensor(4097, dtypes[1], 6, offset=1)})
    before = [wide(row) for row in rows]
    table = EmulatedTable(rows, [group_of(with_)])
    table.steps[:] = with_.step - 1
    table.run(EmulatedDevice(seed=1), kernel)
    check(kernel, rows, before, with_)
    assert (table.steps == with_.step).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Settings, list[tuple[int, int]], int]:
    """A kernel, settings, sizes with offsets, and a grid."""
    name = draw(st.sampled_from(UPDATES))
    flags = draw(st.sampled_from((0, GroupFlag.MAXIMIZE)))
    extra = {
        "adamw": (GroupFlag.DECOUPLED, GroupFlag.AMSGRAD),
        "sgd": (GroupFlag.NESTEROV,),
        "lamb": (GroupFlag.ALWAYS_ADAPT, GroupFlag.NO_BIAS_CORRECTION),
        "lion": (),
    }[name]
    for flag in extra:
        flags |= draw(st.sampled_from((0, flag)))
    share = st.floats(0.0, 0.9995)
    with_ = Settings(
        step=draw(st.integers(1, 2000)),
        lr=draw(st.floats(1e-6, 0.3)),
        beta1=draw(share),
        beta2=draw(share),
        eps=draw(st.sampled_from((1e-8, 1e-6, 1e-3))),
        weight_decay=draw(st.sampled_from((0.0, 1e-4, 0.3))),
        flags=int(flags),
        clip_coef=draw(st.sampled_from((1.0, 0.25, 1e-3))),
    )
    sizes = draw(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 7)), min_size=1, max_size=6))
    return name, with_, sizes, draw(st.integers(1, 6))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(cases())
@example(
    ("adamw", Settings(step=1, lr=0.25, beta1=2e-6, beta2=0.0, eps=1e-8, clip_coef=1e-3), [(889, 0)], 1)
)
def test_any_settings_give_what_the_reference_gives(
    case: tuple[str, Settings, list[tuple[int, int]], int],
) -> None:
    name, with_, sizes, grid = case
    kernel = KERNELS[name]
    f32 = (torch.float32,) * 3
    rows = [
        row_of(kernel, size, f32, seed=i, offset=offset, flags=with_.flags)
        for i, (size, offset) in enumerate(sizes)
    ]
    before = [wide(row) for row in rows]
    table = EmulatedTable(rows, [group_of(with_)])
    table.steps[:] = with_.step - 1
    coef = np.array([with_.clip_coef], np.float32)
    table.run(EmulatedDevice(seed=grid), kernel, grid=grid, clip_coef=coef.ctypes.data)
    check(kernel, rows, before, with_)


STATES = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max", "momentum_buffer": "m"}

TORCH = {
    "adamw": ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": ("adamw", torch.optim.Adam, {"weight_decay": 0.1}),
    "adam-plain": ("adamw", torch.optim.Adam, {}),
    "adam-beta1-0": ("adamw", torch.optim.Adam, {"betas": (0.0, 0.9)}),
    "amsgrad": ("adamw", torch.optim.AdamW, {"amsgrad": True}),
    "maximize": ("adamw", torch.optim.AdamW, {"maximize": True}),
    "sgd": ("sgd", torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd-momentum": ("sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}


def flags_of(optimizer: torch.optim.Optimizer) -> int:
    """The flags of an optimizer's first group."""
    group = optimizer.param_groups[0]
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return (
        GroupFlag.MAXIMIZE * group["maximize"]
        | GroupFlag.DECOUPLED * bool(decoupled)
        | GroupFlag.AMSGRAD * group.get("amsgrad", False)
        | GroupFlag.NESTEROV * group.get("nesterov", False)
    )


def torch_group(optimizer: torch.optim.Optimizer) -> Group:
    """The first group of an optimizer as the kernels read it."""
    group = optimizer.param_groups[0]
    beta1, beta2 = group.get("betas", (group.get("momentum"), group.get("dampening")))
    return Group(
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group.get("eps", 0.0),
        weight_decay=group["weight_decay"],
        flags=flags_of(optimizer),
    )


def table_of(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> tuple[EmulatedTable, list[Tensors]]:
    """A table of copies of an optimizer's parameters, with fresh states."""
    group = optimizer.param_groups[0]
    flags, rows = flags_of(optimizer), []
    for p in group["params"]:
        names = ["p", "g"]
        if "betas" in group or group["momentum"]:
            names.append("m")
        if "betas" in group:
            names.append("v")
        if flags & GroupFlag.AMSGRAD:
            names.append("v_max")
        row = {name: torch.zeros_like(p, dtype=dtype) for name in names}
        row["p"].copy_(p.detach())
        rows.append(row)
    return EmulatedTable(rows, [torch_group(optimizer)]), rows


@pytest.mark.parametrize("case", TORCH)
def test_twenty_steps_end_where_those_of_torch_end_one_by_one_or_all_at_once(case: str) -> None:
    name, make, options = TORCH[case]
    ways = []
    for foreach in (False, True):
        params = [random_tensor(size, torch.float32, size).requires_grad_() for size in (1, 700, 4097)]
        ways.append((params, make(params, lr=0.01, foreach=foreach, **options)))
    table, rows = table_of(ways[0][1], torch.float32)
    device = EmulatedDevice(seed=2)
    for step in range(20):
        for i, row in enumerate(rows):
            row["g"].copy_(random_tensor(row["g"].numel(), torch.float32, 100 * step + i))
            for params, _ in ways:
                params[i].grad = row["g"].clone()
        for _, optimizer in ways:
            optimizer.step()
        table.run(device, KERNELS[name])
    for params, optimizer in ways:
        for p, row in zip(params, rows, strict=True):
            torch.testing.assert_close(row["p"], p.detach(), rtol=1.3e-6, atol=3e-6)
            for theirs, ours in STATES.items():
                if theirs in optimizer.state[p] and ours in row:
                    torch.testing.assert_close(row[ours], optimizer.state[p][theirs], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("case", ("adamw", "sgd", "sgd-momentum"))
def test_sixteen_bits_are_computed_in_fp32_and_rounded_once(case: str, dtype: torch.dtype) -> None:
    # Torch's own fused step is no judge: that of SGD in 2.13 changes nothing on a CPU in 16 bits.
    name, make, options = TORCH[case]
    param = random_tensor(4097, dtype, 1).float().requires_grad_()
    optimizer = make([param], lr=0.01, foreach=False, **options)
    table, (row,) = table_of(optimizer, dtype)
    row["g"].copy_(random_tensor(4097, dtype, 2))
    param.grad = row["g"].float()
    optimizer.step()
    table.run(EmulatedDevice(), KERNELS[name])
    expected = param.detach().to(dtype)
    assert (row["p"] == expected).double().mean() > 0.999, "all but what lies between two numbers"
    torch.testing.assert_close(row["p"], expected, rtol=2 * RTOL[dtype], atol=ATOL[dtype])


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")), ids=str)
@pytest.mark.parametrize("case", ("adamw", "amsgrad", "sgd-momentum"))
def test_what_is_not_finite_spreads_as_in_torch(case: str, bad: float) -> None:
    name, make, options = TORCH[case]
    params = [random_tensor(300, torch.float32, 1).requires_grad_()]
    optimizer = make(params, lr=0.01, foreach=False, **options)
    table, (row,) = table_of(optimizer, torch.float32)
    for step in range(3):
        row["g"].copy_(random_tensor(300, torch.float32, step))
        row["g"][17] = bad if step == 1 else 1.0
        params[0].grad = row["g"].clone()
        optimizer.step()
        table.run(EmulatedDevice(), KERNELS[name])
    assert not torch.isfinite(row["p"][17])
    torch.testing.assert_close(row["p"], params[0].detach(), rtol=1.3e-6, atol=3e-6, equal_nan=True)
