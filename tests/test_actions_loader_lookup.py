"""Copies that are looked up when the script asks: the very tensor's, as long as it is what it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from diagnose.actions._careful import Failure
from diagnose.actions._device_copies import Copies, asks_for
from tests.test_actions_loader_device import META, Side


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.fixture
def failure() -> Failure:
    return Failure()


@pytest.fixture
def copies(side: Side, failure: Failure) -> Iterator[Copies]:
    found = Copies(side, failure)
    with found.looked_up():
        yield found


def test_the_very_tensor_is_found_once(copies: Copies) -> None:
    tensor = torch.ones(3)
    copies.begin(tensor)
    copy = copies._begun[id(tensor)].copy
    assert tensor.to("meta", non_blocking=True) is copy
    assert tensor.to("meta") is not copy, "a second copy is another tensor, as without us"


@pytest.mark.parametrize("other", [lambda t: t[:2], lambda t: t.clone(), lambda t: t.detach()])
def test_another_tensor_is_not_found(copies: Copies, other: Any) -> None:
    tensor = torch.ones(3)
    copies.begin(tensor)
    copy = copies._begun[id(tensor)].copy
    assert other(tensor).to("meta") is not copy


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: t.numpy().__iadd__(1),
        lambda t: t.data.add_(1),
        lambda t: memoryview(t.numpy()).__setitem__(0, 5.0),
        lambda t: setattr(t, "data", torch.ones(2)),
        lambda t: t.requires_grad_(),
    ],
)
@pytest.mark.parametrize("closely", [True, False])
def test_a_tensor_that_is_another_by_now_is_copied_anew(
    copies: Copies, side: Side, change: Callable[[torch.Tensor], object], closely: bool
) -> None:
    tensor = torch.ones(3)
    copies.begin(tensor, closely=closely)
    change(tensor)
    copy = tensor.to("meta")
    assert not side.handed_over
    assert (copy.shape, copy.requires_grad) == (tensor.shape, tensor.requires_grad)


@pytest.mark.parametrize("closely", [True, False])
def test_a_change_that_torch_does_not_see_ends_the_copies(
    copies: Copies, side: Side, failure: Failure, closely: bool
) -> None:
    images = [torch.ones(8, 3, 32, 32) for _ in range(2)]
    for image in images:
        copies.begin(image, closely=closely)
    images[0].numpy()[:, :, :16] = 0
    for image in images:
        image.to("meta")
    assert not side.handed_over
    assert failure.reason.startswith("the script changes a batch where torch does not see it")


def seen(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return change(torch.arange(48.0).view(2, 3, 2, 4).clone())


@pytest.mark.parametrize("closely", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        seen(lambda t: t),
        seen(lambda t: t.index_fill(0, torch.tensor([0]), float("nan"))),
        seen(lambda t: t.contiguous(memory_format=torch.channels_last)),
        seen(lambda t: t[:, :, :, ::2]),
        seen(lambda t: t[:1].expand(5, 3, 2, 4)),
        seen(lambda t: t.to(torch.bfloat16)),
        seen(lambda t: t.to(torch.complex64)),
        seen(lambda t: t > 3),
        seen(lambda t: t.to(torch.uint8)),
        torch.tensor(3),
        torch.ones(0, 4),
        torch.ones(5000),
    ],
)
def test_a_tensor_that_is_what_it_was_is_found(
    copies: Copies, side: Side, tensor: torch.Tensor, closely: bool
) -> None:
    copies.begin(tensor, closely=closely)
    assert tensor.to("meta").shape == tensor.shape
    assert side.handed_over == 1


@pytest.mark.parametrize(
    ("pinned", "how", "waits"), [(True, {}, 1), (True, {"non_blocking": True}, 0), (False, {}, 0)]
)
def test_the_script_waits_where_it_may_write_to_memory_that_is_read(
    copies: Copies, side: Side, monkeypatch: Any, pinned: bool, how: Any, waits: int
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    tensors = [torch.ones(3), torch.ones(3)]
    for tensor in tensors:
        copies.begin(tensor)
    tensors[0].to("meta", **how)
    assert (side.handed_over, side.waited) == (1, waits)


def test_an_entry_ends_with_its_tensor(copies: Copies) -> None:
    tensor = torch.ones(3)
    copies.begin(tensor)
    assert len(copies._begun) == 1
    del tensor
    gc.collect()
    assert len(copies._begun) == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "plain"),
    [
        (("meta",), {}, True),
        ((META,), {"non_blocking": True}, True),
        ((), {"device": "meta"}, True),
        (("cpu",), {}, False),
        ((torch.float64,), {}, False),
        (("meta", torch.float64), {}, False),
        (("meta",), {"dtype": torch.float64}, False),
        (("meta",), {"copy": True}, False),
        (("meta",), {"memory_format": torch.channels_last}, False),
        ((torch.ones(1),), {}, False),
        ((), {}, False),
    ],
)
def test_only_a_plain_move_to_the_device_is_looked_up(args: Any, kwargs: Any, plain: bool) -> None:
    assert asks_for(META, args, kwargs) is plain


def test_parameters_and_tensors_of_other_kinds_are_left_alone(copies: Copies) -> None:
    copies.begin(torch.ones(2, requires_grad=True))
    copies.begin(torch.nn.Parameter(torch.ones(2)))
    copies.begin(torch.ones(2).to_sparse())
    assert len(copies._begun) == 0
