"""Batches pinned, or on their way to the device before the script asks; it runs without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, _utils

from diagnose.actions import device_prefetch
from diagnose.actions._careful import Failure
from diagnose.actions._device_copies import Copies
from diagnose.actions._loader_ahead import NOTHING
from diagnose.actions._loader_choice import sources
from diagnose.actions._loader_purity import leaves
from diagnose.actions._loader_service import in_force, on_every_feed, put_on, shape, started
from diagnose.actions._loader_switch import Feed, feed_of
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.device_prefetch import DevicePrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.pin_memory import PinMemory
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, children_end, equal, loop, off, on
from tests.test_actions_loader_order import KINDS

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
            feed_of(batches).put(look)

        with ExitStack() as stack:
            if self.num_workers:
                pools = stack.enter_context(started(sources(job), self.num_workers, 2, exact=True))
                stack.enter_context(in_force(job, pools))
            start = lambda: put_on(job.iterators, look)  # noqa: E731
            stack.enter_context(on_every_feed(job, start, begins, look))
            yield

    def state(self, job: Job) -> Any:
        return shape(job)


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        ("generator", 2),
        pytest.param("two workers, generator", 0, marks=pytest.mark.extended),
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
        for tensor in leaves(feed.next_if_there()):
            copies.begin(tensor)
        return data

    feed.put(look_ahead)
    next(batches)
    begun = [each.copy for each in copies._begun.values()]
    assert len(begun) == 1
    assert next(batches).to("meta") is begun[0]
    feed.take_out(look_ahead)
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
