"""The action that lets the garbage collector run between steps only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from diagnose.actions import gc_freeze
from diagnose.actions.base import CannotApply
from diagnose.actions.gc_freeze import GcFreeze
from diagnose.core.job import Job
from tests.test_actions_process import run
from tests.toggled import ConvNet, always, assert_equal, images, tuned


class Node:
    """Part of a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def test_collecting_between_steps_trains_bit_for_bit_as_the_script_does_alone() -> None:
    assert_equal(run(GcFreeze()), run(None))


def test_no_collection_runs_inside_a_step_and_one_at_its_end() -> None:
    inside: list[int] = []
    training = False

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and training:
            inside.append(info["generation"])

    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    freed: list[weakref.ref[Node]] = []
    with tuned(GcFreeze(), on=always) as live:
        gc.callbacks.append(note)
        try:
            for image, label in images():
                assert live is not None
                training = bool(live.on_steps)
                assert all(node() is None for node in freed[4:-1]), "the boundary has freed them"
                objects = [Node() for _ in range(5000)]
                freed.append(weakref.ref(objects[0]))
                nn.functional.cross_entropy(model(image), label).backward()
                optimizer.step()
                optimizer.zero_grad()
                del objects
                training = False
        finally:
            gc.callbacks.remove(note)
    assert inside == []


def test_what_has_survived_a_step_is_collected_now_and_then() -> None:
    job = Job()
    with GcFreeze().apply(job, None):
        node = Node()
        freed = weakref.ref(node)
        job.on_step[0]()
        del node
        for _ in range(gc_freeze.FULL_EVERY - 2):
            job.on_step[0]()
        assert freed() is not None
        job.on_step[0]()
        assert freed() is None


def test_a_process_that_grows_is_collected_early(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = 1 << 30
    monkeypatch.setattr(gc_freeze, "resident_bytes", lambda: resident)
    job = Job()
    with GcFreeze().apply(job, None):
        node = Node()
        freed = weakref.ref(node)
        job.on_step[0]()
        del node
        resident += gc_freeze.GROWTH_BYTES
        for _ in range(gc_freeze.LOOK_EVERY):
            job.on_step[0]()
        assert freed() is None


def test_a_process_that_grows_on_its_gpu_is_collected_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocated = 1 << 30
    monkeypatch.setattr(gc_freeze, "resident_bytes", lambda: 1 << 30)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated)
    job = Job()
    with GcFreeze().apply(job, None):
        node = Node()
        freed = weakref.ref(node)
        job.on_step[0]()
        del node
        for _ in range(gc_freeze.LOOK_EVERY):
            job.on_step[0]()
        assert freed() is not None
        allocated += 512 << 20
        for _ in range(gc_freeze.LOOK_EVERY):
            job.on_step[0]()
        assert freed() is None


@pytest.mark.extended
def test_a_process_that_grows_on_and_on_is_collected_early_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fills a cache of its own: a look at all objects costs as much as what it is there to spare."""
    held = [1 << 30, 0]
    monkeypatch.setattr(gc_freeze, "held_bytes", lambda: tuple(held))
    monkeypatch.setattr(gc_freeze, "FULL_EVERY", 1 << 30)
    grown: list[int] = []
    job = Job()

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            grown.append((held[0] - (1 << 30)) // gc_freeze.GROWTH_BYTES)

    def grow(times: int) -> None:
        for _ in range(times):
            held[0] += gc_freeze.GROWTH_BYTES
            for _ in range(gc_freeze.LOOK_EVERY):
                job.on_step[0]()

    with GcFreeze().apply(job, None):
        gc.callbacks.append(collected)
        try:
            grow(48)
        finally:
            gc.callbacks.remove(collected)
    assert grown == [1, 3, 7, 15, 31, 47]


@pytest.mark.extended
def test_one_whose_garbage_is_what_grows_is_collected_as_early_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = [1 << 30, 0]
    monkeypatch.setattr(gc_freeze, "held_bytes", lambda: tuple(held))
    collected: list[int] = []

    def freed(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            collected.append(held[1])
            held[1] = 0

    job = Job()
    with GcFreeze().apply(job, None):
        gc.callbacks.append(freed)
        try:
            for _ in range(6):
                held[0] += gc_freeze.GROWTH_BYTES // 4  # of other things
                held[1] += gc_freeze.GROWTH_BYTES
                for _ in range(gc_freeze.LOOK_EVERY):
                    job.on_step[0]()
        finally:
            gc.callbacks.remove(freed)
    assert collected == [gc_freeze.GROWTH_BYTES] * 6


@pytest.mark.parametrize("among_ranks", [False, True])
def test_collections_that_find_nothing_become_rare_and_among_ranks_all_do(
    among_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one rank has found, and how it has grown, must not move its collections against the others'."""
    resident = 1 << 30
    monkeypatch.setattr(gc_freeze, "resident_bytes", lambda: resident)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: among_ranks)
    grown_at = 10 * gc_freeze.LOOK_EVERY
    full: list[int] = []
    steps: list[None] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(len(steps))

    job = Job()
    gc.collect()
    with GcFreeze().apply(job, None):
        gc.callbacks.append(note)
        try:
            for _ in range(7 * gc_freeze.FULL_EVERY):
                steps.append(None)
                node = Node()
                if not among_ranks:
                    del node.me  # no cycle: nothing is found
                elif len(steps) == grown_at:
                    resident += gc_freeze.GROWTH_BYTES
                job.on_step[0]()
                del node
        finally:
            gc.callbacks.remove(note)
    early = [grown_at] if among_ranks else []
    assert full == [*early, *(gc_freeze.FULL_EVERY * times for times in (1, 3, 7))]


def test_garbage_of_one_long_step_is_collected_before_its_end() -> None:
    with GcFreeze().apply(Job(), None):
        first = weakref.ref(node := Node())
        del node
        kept = [Node() for _ in range(2 * gc_freeze.ALLOCATIONS)]
        assert first() is None
        del kept


@pytest.mark.parametrize(
    "theirs, reason",
    [(gc.disable, "switched"), (lambda: gc.set_threshold(0), "switched"), (gc.freeze, "frozen")],
    ids=["off", "off for good", "frozen"],
)
def test_a_script_that_cares_for_the_collector_itself_is_left_alone(
    theirs: Callable[[], None], reason: str
) -> None:
    before = gc.get_threshold()
    theirs()
    try:
        with pytest.raises(CannotApply, match=reason):
            GcFreeze().check(Job())
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.unfreeze()


def test_thresholds_of_the_scripts_own_come_back() -> None:
    before = gc.get_threshold()
    gc.set_threshold(123, 4, 5)
    try:
        with GcFreeze().apply(Job(), None):
            assert gc.get_threshold()[0] == gc_freeze.ALLOCATIONS
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)
