"""The table: every kind of parameter and gradient that a script may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from diagnose.kernels._layout import disjoint, fits
from diagnose.kernels._structs import CHUNK_ELEMENTS, SMALL_ELEMENTS, Row
from diagnose.kernels._swap import Swap, swap, unswap
from diagnose.kernels._table import Table, lay_out
from torch import nn

from tests.kernels_on_cpu import CPU, CpuDevice, kernels_on_cpu

Gradients = Callable[[int, list[torch.Tensor]], list[torch.Tensor | None]]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """As of a driver before CUDA 12.1, unless a test asks for one that takes large arguments."""
    with kernels_on_cpu(seed=3, large_arguments=getattr(request, "param", False)) as device:
        yield device


def like(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """A gradient for each parameter: the same ones for the same number."""
    generator = torch.Generator().manual_seed(number)
    grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
    return [torch.empty_like(p).copy_(grad) for p, grad in zip(params, grads, strict=True)]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1)


def trained(
    make_params: Callable[[], list[torch.Tensor]],
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    *,
    on: bool,
    grads: Gradients = like,
    steps: int = 4,
    each: Callable[[int, torch.optim.Optimizer, list[torch.Tensor]], object] = lambda *_: None,
) -> tuple[list[torch.Tensor], Swap | None]:
    """Parameters and state after some steps; and the swap, if it was on."""
    torch.manual_seed(0)
    params = make_params()
    optimizer = make(params)
    taken = swap(optimizer) if on else None
    for number in range(steps):
        for p, grad in zip(params, grads(number, params), strict=False):
            p.grad = grad
        optimizer.step()
        each(number, optimizer, params)
    state = [optimizer.state_dict()["state"].get(index, {}) for index in range(len(params))]
    held = [v.detach().clone() for one in state for v in one.values() if isinstance(v, torch.Tensor)]
    return [p.detach().clone() for p in params] + held, taken


def assert_same_as_torch(
    make_params: Callable[[], list[torch.Tensor]], *args: Any, rtol: float = 2e-5, **options: Any
) -> Swap:
    """Trains with kernels and without.

    Returns:
        The swap of the run with kernels.
    """
    theirs, _ = trained(make_params, *args, on=False, **options)
    ours, taken = trained(make_params, *args, on=True, **options)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10)
    assert taken is not None
    return taken


def several() -> list[torch.Tensor]:
    """Small and large ones, one without elements, one without dimensions."""
    return [nn.Parameter(torch.randn(shape)) for shape in ((3,), (0, 4), (), (1,), (40, 60), (130, 130))]


@pytest.mark.parametrize("make", [adamw, sgd])
def test_parameters_of_all_sizes_are_updated_by_one_launch(make: Any, device: CpuDevice) -> None:
    taken = assert_same_as_torch(several, make)
    assert taken.stepper.left == []
    assert device.launched.count(make.__name__) == 4


@pytest.mark.parametrize(
    "count", [0, 1, 3, 31, 1023, SMALL_ELEMENTS, SMALL_ELEMENTS + 1, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS]
)
def test_every_element_is_in_exactly_one_chunk_of_its_row(count: int) -> None:
    rows = [Row(count=count), Row(count=5), Row(count=count)]
    chunks, num_large = lay_out(rows)
    for index, row in enumerate(rows):
        own = chunks[row.first_chunk : row.first_chunk + row.num_chunks]
        assert all((own[:, 1] & 0xFFFFFFFF) == index)
        covered = [(int(start), int(start + (word >> 32))) for start, word in own]
        assert covered == sorted(covered)
        assert sum(end - start for start, end in covered) == row.count
        assert all(end == start for (_, end), (start, _) in pairwise(covered))
    sizes = [int(word >> 32) for word in chunks[:, 1]]
    assert num_large == (2 * -(-count // CHUNK_ELEMENTS) if count > SMALL_ELEMENTS else 0)
    assert max(sizes) <= CHUNK_ELEMENTS


def test_a_tensor_above_two_to_the_31_elements_is_laid_out() -> None:
    rows = [Row(count=2**31 + 5)]
    chunks, num_large = lay_out(rows)
    assert (len(chunks), num_large) == (2**31 // CHUNK_ELEMENTS + 1,) * 2
    assert chunks[-1].tolist() == [2**31, 5 << 32]


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_parameter_without_a_gradient_is_left_alone_and_its_step_not_counted(
    make: Any, device: CpuDevice
) -> None:
    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [
            None if (index + number) % 3 == 0 else grad for index, grad in enumerate(like(number, params))
        ]

    taken = assert_same_as_torch(several, make, grads=grads, steps=7)
    assert taken.stepper.left == []


def test_a_step_in_which_nothing_has_a_gradient_does_nothing(device: CpuDevice) -> None:
    ours, _ = trained(several, on=True, grads=lambda number, params: [None] * len(params))
    assert device.launched == []
    assert len(ours) == len(several())


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_parameter_thawed_later_starts_as_in_torch(make: Any, device: CpuDevice) -> None:
    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        return [grad if number >= 2 or index else None for index, grad in enumerate(like(number, params))]

    assert_same_as_torch(several, make, grads=grads, steps=6)


def test_a_group_added_later_is_stepped_with_its_own_numbers(device: CpuDevice) -> None:
    extra: list[torch.Tensor] = []

    def each(number: int, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        if number == 1:
            torch.manual_seed(5)
            params.append(nn.Parameter(torch.randn(7, 7)))
            optimizer.add_param_group({"params": params[-1], "lr": 0.1, "betas": (0.5, 0.9)})

    extra.clear()
    taken = assert_same_as_torch(several, each=each, steps=5)
    assert taken.stepper.left == []


def test_groups_have_their_own_numbers_and_changes_are_seen(device: CpuDevice) -> None:
    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.0, "eps": 1e-3}]
        )

    def each(number: int, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[1]["betas"] = (0.8, 0.9)
        optimizer.param_groups[1]["maximize"] = number == 2

    assert_same_as_torch(several, make, each=each)


def channels_last() -> list[torch.Tensor]:
    return [
        nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(6, 5).t()),
        nn.Parameter(torch.randn(5, 1, 3)),
    ]


@pytest.mark.parametrize("make", [adamw, sgd])
def test_tensors_without_gaps_in_any_order_are_taken(make: Any, device: CpuDevice) -> None:
    taken = assert_same_as_torch(channels_last, make)
    assert taken.stepper.left == []


def test_strides_of_dimensions_of_size_1_say_nothing(device: CpuDevice) -> None:
    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        *others, last = like(number, params)
        assert last is not None
        return [*others, last.as_strided((5, 1, 3), (3, 77, 1))]

    assert assert_same_as_torch(channels_last, grads=grads).stepper.left == []


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_parameter_whose_gradient_lies_otherwise_is_stepped_by_torch_bit_for_bit(
    make: Any, device: CpuDevice
) -> None:
    """And the others by kernels; from one step to the next this may change."""

    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        first, *others = like(number, params)
        assert first is not None
        return [first if number == 2 else first.contiguous(), *others]

    theirs, _ = trained(channels_last, make, on=False, grads=grads, steps=2)
    ours, taken = trained(channels_last, make, on=True, grads=grads, steps=2)
    assert torch.equal(ours[0], theirs[0])
    assert taken is not None and "in memory in" in taken.stepper.left[0]
    assert device.launched.count(make.__name__) == 2
    assert_same_as_torch(channels_last, make, grads=grads, steps=5)


def test_one_that_fit_and_does_not_any_more_keeps_its_count_of_steps(device: CpuDevice) -> None:
    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        first, *others = like(number, params)
        assert first is not None
        return [first.contiguous() if number == 2 else first, *others]

    taken = assert_same_as_torch(channels_last, grads=grads, steps=4)
    assert taken.stepper.left == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_rounded_as_by_torchs_fused_step(
    dtype: torch.dtype, device: CpuDevice
) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-6, fused=True)

    def mixed() -> list[torch.Tensor]:
        return [nn.Parameter(torch.randn(40, 70).to(dtype)), nn.Parameter(torch.randn(33))]

    taken = assert_same_as_torch(mixed, make, rtol=2 * torch.finfo(dtype).eps)
    assert taken.stepper.left == []
    assert device.launched.count("adamw") == 4, "both types by one launch"


def test_a_type_that_no_kernel_knows_is_left_to_torch(device: CpuDevice) -> None:
    taken = assert_same_as_torch(
        lambda: [nn.Parameter(torch.randn(9)), nn.Parameter(torch.randn(9))],
        each=lambda number, optimizer, params: (
            setattr(params[1], "data", params[1].data.double()) if number == 1 else None
        ),
        grads=lambda number, params: [torch.full_like(p, number + 1.0) for p in params],
        steps=2,
    )
    assert taken.stepper.left == []


def test_gradients_that_are_views_at_odd_places_of_one_buffer_are_taken(device: CpuDevice) -> None:
    """As with DDP's `gradient_as_bucket_view`, and parameters as in a flat buffer."""
    buffers: list[torch.Tensor] = []

    def flat() -> list[torch.Tensor]:
        buffers[:] = [torch.randn(6000), torch.zeros(6000)]
        return [nn.Parameter(buffers[0][1:4]), nn.Parameter(buffers[0][5:5005].view(50, 100))]

    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        made = [buffers[1][3:6], buffers[1][7:5007].view(50, 100)]
        for view, grad in zip(made, like(number, params), strict=True):
            assert grad is not None
            view.copy_(grad)
        return list(made)

    assert assert_same_as_torch(flat, grads=grads).stepper.left == []


def test_a_nan_spreads_as_with_torch_when_no_scaler_looks(device: CpuDevice) -> None:
    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        made = like(number, params)
        assert made[4] is not None
        made[4][0, 0] = float("nan")
        return made

    theirs, _ = trained(several, on=False, grads=grads)
    ours, _ = trained(several, on=True, grads=grads)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, equal_nan=True)
    assert ours[4].isnan().sum() == 1


def test_gradients_that_add_up_over_several_backward_passes_are_used_whole(device: CpuDevice) -> None:
    def accumulate(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        for micro in range(3):
            for p, grad in zip(params, like(10 * number + micro, params), strict=True):
                assert grad is not None
                p.grad = grad if micro == 0 and number % 2 else (0 if p.grad is None else p.grad) + grad
        return [p.grad for p in params]

    assert_same_as_torch(several, grads=accumulate)


def test_what_it_holds_on_the_device_is_small(device: CpuDevice) -> None:
    """No buffer of a parameter's size: what 161 tensors of 25 million elements need is under 300 KB."""
    rows = [Row(count=160_000) for _ in range(160)]
    held = sum(tensor.nbytes for tensor in Table(CPU, rows, [])._memory.values())
    assert held < 300_000


def test_a_parameter_whose_state_lacks_what_its_group_asks_for_fails_as_in_torch(device: CpuDevice) -> None:
    params = several()
    optimizer = adamw(params)
    swap(optimizer)
    for p, grad in zip(params, like(0, params), strict=True):
        p.grad = grad
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()
    unswap(optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize(
    "tensors, expected",
    [
        ([torch.zeros(2, 2, 2, 2), torch.zeros(2, 2, 2, 2)], True),
        ([torch.zeros(2, 3), torch.zeros(2, 3)], True),
        ([torch.zeros(3, 2).t(), torch.zeros(3, 2).t()], True),
        ([torch.zeros(1, 3), torch.zeros(3, 1).t()], True),
        ([torch.zeros(2, 3), torch.zeros(3, 2).t()], False),
        ([torch.zeros(4, 6)[:, ::2], torch.zeros(4, 6)[:, ::2]], False),
        ([torch.zeros(2, 2), torch.zeros(2, 2).to_sparse()], False),
        ([torch.zeros(2, 3), torch.zeros(3, 2)], False),
        ([torch.zeros(()), torch.zeros(())], True),
        ([torch.zeros(0, 3), torch.zeros(0, 3)], True),
        ([torch.zeros(8).as_strided((2, 2, 2), (1, 1, 5))] * 2, False),
        ([torch.zeros(9).as_strided((3, 3), (1, 1))] * 2, False),
    ],
)
def test_only_tensors_without_gaps_or_overlaps_and_alike_fit(
    tensors: list[torch.Tensor], expected: bool
) -> None:
    assert fits(tensors) is expected


def test_parameters_that_touch_do_not_share_memory() -> None:
    flat = torch.zeros(10)
    assert disjoint([flat[5:], flat[:5], flat[:0]])
    assert not disjoint([flat[5:], flat[:6]])
    assert not disjoint([flat, flat])
