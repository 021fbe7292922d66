"""Batches pinned, or on their way to the device before the script asks; the look-up runs without one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, _utils

from diagnose.actions import device_prefetch
from diagnose.actions._careful import Failure
from diagnose.actions._device_copies import Copies, asks_for
from diagnose.actions._loader_ahead import NOTHING
from diagnose.actions._loader_choice import sources
from diagnose.actions._loader_purity import leaves
from diagnose.actions._loader_service import in_force, shape, started
from diagnose.actions._loader_switch import Feed, feed_of, feeds
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.device_prefetch import DevicePrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.pin_memory import PinMemory
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, loop, off, on
from tests.test_actions_loader_order import KINDS, children_end, equal

META = torch.device("meta")
BATCH_BYTES = 4 * 2 * 4


class Side:
    """Copies to a device that holds nothing."""

    device = META

    def __init__(self) -> None:
        self.handed_over = self.waited = 0

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.to(META), None

    def hand_over(self, copy: torch.Tensor, done: Any, *, waits: bool) -> None:
        self.handed_over += 1
        self.waited += waits


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
    assert len(copies) == 1
    del tensor
    gc.collect()
    assert len(copies) == 0


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
    assert len(copies) == 0


class LooksAhead(Action):
    """Looks at the next batch whenever one is handed out, with workers of ours or the script's own."""

    def __init__(self, found: list[Any], num_workers: int) -> None:
        self.found, self.num_workers = found, num_workers

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        def look(feed: Feed, data: Any) -> Any:
            time.sleep(0.01)
            self.found.append(feed.next_if_there())
            return data

        def begins(loader: Any, batches: Any) -> None:
            if look not in feed_of(batches).in_force:
                feed_of(batches).finish_with(look)

        with ExitStack() as stack:
            if self.num_workers:
                pools = stack.enter_context(started(sources(job), self.num_workers, 2, exact=True))
                stack.enter_context(in_force(job, pools))
            for batches in job.iterators:
                feed_of(batches).finish_with(look)
            job.on_iterator.append(begins)
            try:
                yield
            finally:
                job.on_iterator.remove(begins)
                for _, feed in feeds():
                    feed.finish_without(look)

    def state(self, job: Job) -> Any:
        return shape(job)


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        ("generator", 2),
        ("two workers, generator", 0),
        ("two workers", 1),
        ("persistent", 0),
        ("shuffle", 0),
    ],
)
def test_looking_at_the_next_batch_changes_nothing(kind: str, num_workers: int) -> None:
    found: list[Any] = []
    plan = {2: on(None), 8: off, 12: on(None)}
    for stop_at in (-1, 6):
        ours = list(loop(KINDS[kind], LooksAhead(found, num_workers), plan, epochs=3, stop_at=stop_at))
        assert equal(ours, loop(KINDS[kind], epochs=3, stop_at=stop_at))
        there = [batch for batch in found if batch is not NOTHING]
        assert bool(there) is (kind != "shuffle")
        never = [batch for batch in there if not any(batch is handed for handed in ours)]
        assert len(never) <= (3 if stop_at > 0 else 0), (
            "the very objects come next, unless the loop is left"
        )
        found.clear()
    assert children_end()


def test_the_copy_of_the_next_batch_is_begun_when_one_is_handed_out(copies: Copies) -> None:
    job = Job()
    batches = begin(job, KINDS["two workers"]())
    feed = feed_of(batches)

    def look_ahead(feed: Feed, data: Any) -> Any:
        time.sleep(0.2)
        leaves(feed.next_if_there(), copies.begin)
        return data

    feed.finish_with(look_ahead)
    next(batches)
    begun = [each.copy for each in copies._begun.values()]
    assert len(begun) == 1
    assert next(batches).to("meta") is begun[0]
    feed.finish_without(look_ahead)
    assert len(list(batches)) == 8
    assert children_end()


SECOND = torch.device("cuda", 1)


def test_all_windows_share_one_stream_on_the_models_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps memory for each stream that there ever was."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    action, job = DevicePrefetch(), Job(device="cuda", torch_device=SECOND)
    batches = begin(job, KINDS["two workers"]())
    with action.prepare(job, None) as prepared:
        for _ in range(3):
            with action.apply(job, prepared):
                pass
    assert made == [SECOND]
    assert len(list(batches)) == 10
    assert children_end()


@pytest.mark.parametrize("hits", [0, 3])
def test_a_loop_that_changes_batches_past_torch_gets_its_own_and_the_action_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, hits: int
) -> None:
    """From its first batch on, or later, when only some elements are looked at."""
    side = Side()
    monkeypatch.setattr(device_prefetch, "SideStream", lambda place: side)
    monkeypatch.setattr(device_prefetch, "free_at_peak", lambda job: 100 * BATCH_BYTES)
    action, job = DevicePrefetch(), Job(device="cuda", torch_device=SECOND)
    batches = begin(job, KINDS["two workers"]())
    with action.prepare(job, None) as prepared:
        with action.apply(job, prepared):
            for batch in batches:
                if side.handed_over == hits:
                    batch.numpy()[:] = -1
                batch.to(META)
                time.sleep(0.05)
        assert side.handed_over == hits
        assert action.why_not_stay(prepared).startswith("the script changes a batch where torch")
        with pytest.raises(CannotApply, match="numpy"), action.apply(job, prepared):
            pass
    assert children_end()


@pytest.mark.parametrize("batches_free", [3.9, 4])
def test_batches_are_copied_early_only_where_several_find_room(
    batches_free: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Side()
    monkeypatch.setattr(device_prefetch, "SideStream", lambda place: side)
    monkeypatch.setattr(device_prefetch, "free_at_peak", lambda job: batches_free * BATCH_BYTES)
    action, job = DevicePrefetch(), Job(device="cuda", torch_device=SECOND)
    batches = begin(job, KINDS["two workers"]())
    with action.prepare(job, None) as prepared:
        with action.apply(job, prepared):
            for batch in batches:
                batch.to(META)
                time.sleep(0.05)
        if batches_free == 4:
            assert side.handed_over and not action.why_not_stay(prepared)
        else:
            assert not side.handed_over
            assert action.why_not_stay(prepared).startswith("copies of batches may need 128 B; 125 B are")
            with pytest.raises(CannotApply, match="free at the peak"), action.apply(job, prepared):
                pass
    assert children_end()


class Short(Side):
    """Has memory for one copy."""

    begun = 0

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.begun += 1
        if self.begun == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().begin(tensor)


def test_a_copy_that_finds_no_memory_ends_the_copies_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Short()
    monkeypatch.setattr(device_prefetch, "SideStream", lambda place: side)
    monkeypatch.setattr(device_prefetch, "free_at_peak", lambda job: 100 * BATCH_BYTES)
    action, job, found = DevicePrefetch(), Job(device="cuda", torch_device=SECOND), []
    batches = begin(job, DataLoader(Rows(), 4))
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    with action.prepare(job, None) as prepared:
        with action.apply(job, prepared):
            for batch in batches:
                found.append(batch)
                time.sleep(0.05)
        assert action.why_not_stay(prepared).startswith("a copy could not be begun: OutOfMemoryError: CUDA")
    assert side.begun == 2
    (pool,) = switch.prepare(2)
    assert not pool.broken
    switch.close()
    assert equal(found, DataLoader(Rows(), 4))
    assert children_end()


@pytest.mark.parametrize("action", [PinMemory(), DevicePrefetch()])
def test_without_an_accelerator_it_is_refused(action: Action) -> None:
    job = Job()
    begin(job, KINDS["two workers"]())
    with pytest.raises(CannotApply, match=r"there is nothing to copy to"):
        action.check(job)
    job.iterators.clear()
    assert children_end()


def test_a_batch_that_cannot_be_pinned_comes_as_it_is() -> None:
    """As here, where there is nothing to pin it for."""
    job, action = Job(), PinMemory()
    loader = DataLoader(torch.arange(12.0).reshape(6, 2).unbind(), 2)  # type: ignore[arg-type]
    batches = begin(job, loader)
    with action.prepare(job, None) as prepared:
        with action.apply(job, prepared):
            assert equal(batches, loader)
        if not torch.accelerator.is_available():
            assert action.why_not_stay(prepared).startswith("a batch cannot be pinned: RuntimeError: ")
            with pytest.raises(CannotApply, match="cannot be pinned"), action.apply(job, prepared):
                pass


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda batch: batch.add_(1), "the script writes to its batches"),
        (lambda batch: batch.add(1), ""),
        (lambda batch: batch.sum().item(), ""),
    ],
)
def test_batches_are_pinned_only_where_the_script_does_not_write_to_them(
    use: Callable[[torch.Tensor], object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From pinned memory a copy is read when the device comes to it, after the script has written."""
    pinned: list[torch.Tensor] = []

    def pin(data: torch.Tensor) -> torch.Tensor:
        pinned.append(data.clone())
        return pinned[-1]

    monkeypatch.setattr(_utils.pin_memory, "pin_memory", pin)
    job, action = Job(), PinMemory()
    loader = DataLoader(torch.arange(12.0).reshape(6, 2).unbind(), 2)  # type: ignore[arg-type]
    batches = begin(job, loader)
    with action.prepare(job, None) as prepared:
        with action.apply(job, prepared):
            for batch in batches:
                use(batch)
        assert action.why_not_stay(prepared).startswith(reason)
        assert bool(action.why_not_stay(prepared)) is bool(reason)
        assert len(pinned) == (1 if reason else 3)


def test_an_evaluation_in_inference_mode_is_no_reason_against_pinning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_utils.pin_memory, "pin_memory", torch.clone)
    job, action = Job(), PinMemory()
    loader = DataLoader(torch.arange(12.0).reshape(6, 2).unbind(), 2)  # type: ignore[arg-type]
    batches = begin(job, loader)
    with action.prepare(job, None) as prepared, torch.inference_mode():
        with action.apply(job, prepared):
            for batch in batches:
                batch.add_(1)
        assert action.why_not_stay(prepared) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("action", [PinMemory(), DevicePrefetch()])
@pytest.mark.parametrize("kind", ["two workers", "two workers, generator", "persistent"])
def test_on_a_gpu_batches_and_their_copies_are_the_same(action: Action, kind: str) -> None:
    def moved(action: Action | None) -> list[Any]:
        torch.manual_seed(3)
        job, found = Job(device="cuda"), []
        loader = KINDS[kind]()
        with ExitStack() as stack:
            for epoch in range(3):
                for number, batch in enumerate(begin(job, loader)):
                    if action is not None and (epoch, number) == (0, 2):
                        action.check(job)
                        prepared = stack.enter_context(action.prepare(job, None))
                        stack.enter_context(action.apply(job, prepared))
                    assert batch.device.type == "cpu"
                    on_device = batch.to("cuda", non_blocking=True)
                    found += [batch.clone(), (on_device * 2).cpu(), torch.rand(1)]
        return found

    assert equal(moved(action), moved(None))
    assert children_end()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_on_a_gpu_the_script_may_write_to_a_batch_before_and_after_it_is_sent(pinned: bool) -> None:
    def moved(action: Action | None) -> list[Any]:
        job, found = Job(device="cuda"), []
        loader = DataLoader(Rows(), 4, num_workers=2, pin_memory=pinned)
        with ExitStack() as stack:
            for number, batch in enumerate(begin(job, loader)):
                if action is not None and number == 2:
                    prepared = stack.enter_context(action.prepare(job, None))
                    stack.enter_context(action.apply(job, prepared))
                if number > 5:
                    batch.numpy()[:, 0] = 7
                on_device = batch.to("cuda")
                batch.zero_()
                found.append(on_device.cpu())
        return found

    assert equal(moved(DevicePrefetch()), moved(None))
    assert children_end()
