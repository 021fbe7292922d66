"""Actions on the process: threads, the garbage collector, flags of the GPU's libraries."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions import gc_freeze
from diagnose.actions.base import CannotApply
from diagnose.actions.cudnn_benchmark import CudnnBenchmark
from diagnose.actions.gc_freeze import GcFreeze
from diagnose.actions.sdpa import CUDNN, CUDNN_FIRST, Sdpa
from diagnose.actions.set_threads import SetThreads, cpus
from diagnose.actions.tf32_matmul import Tf32Matmul
from diagnose.core.job import Job
from diagnose.hooks._recorder import Recorder
from diagnose.launch.tuning import LiveTuning
from tests.toggled import ConvNet, always, assert_close, assert_equal, images, train, tuned, weights


def run(action: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with tuned(action, **options):
        train(model, optimizer, images())
    return weights(model)


# -- threads


def test_another_number_of_threads_trains_as_the_script_does_alone() -> None:
    other = torch.get_num_threads() + 1
    assert_close(run(SetThreads(), value=other), run(None))


def test_the_choices_are_one_half_and_all_save_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert SetThreads().values(Job()) == [1, 16]
    assert SetThreads().values(Job(local_ranks=4)) == [1, 2, 4]
    assert SetThreads().values(Job(facts={"quota_cpus": 6.5})) == [1, 3, 6]


def test_each_rank_has_at_least_one_cpu() -> None:
    assert cpus(Job(local_ranks=10_000)) == 1


def test_threads_are_guessed_at_only_where_eager_operations_run_on_a_cpu() -> None:
    SetThreads().check_unasked(Job(models=[ConvNet()]))
    with pytest.raises(CannotApply, match="on a device"):
        SetThreads().check_unasked(Job(models=[ConvNet()], device="cuda"))
    model = ConvNet()
    model.compile(backend="eager")
    with pytest.raises(CannotApply, match="compiles ConvNet itself"):
        SetThreads().check_unasked(Job(models=[model]))


def test_without_a_choice_threads_are_refused() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(CannotApply, match="no choice"):
            SetThreads().check(Job(local_ranks=10_000))
    finally:
        torch.set_num_threads(threads)


# -- the garbage collector


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


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def threshold_of_none() -> Iterator[None]:
    """The usual way to switch it off for good."""
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def collector_frozen() -> Iterator[None]:
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    "theirs, reason",
    [(collector_off, "switched"), (threshold_of_none, "switched"), (collector_frozen, "frozen")],
)
def test_a_script_that_cares_for_the_collector_itself_is_left_alone(theirs: Any, reason: str) -> None:
    with theirs(), pytest.raises(CannotApply, match=reason):
        GcFreeze().check(Job())


def test_thresholds_of_the_scripts_own_come_back() -> None:
    before = gc.get_threshold()
    gc.set_threshold(123, 4, 5)
    try:
        with GcFreeze().apply(Job(), None):
            assert gc.get_threshold()[0] == gc_freeze.ALLOCATIONS
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)


# -- flags


@pytest.mark.parametrize(
    "action", [Tf32Matmul(), CudnnBenchmark(), Sdpa()], ids=lambda action: type(action).__name__
)
def test_without_a_gpu_its_flags_are_refused(action: Any) -> None:
    with pytest.raises(CannotApply):
        action.check(Job(models=[ConvNet()]))


def test_tf32_is_set_and_put_back() -> None:
    action, job = Tf32Matmul(), Job(device="cuda")
    before = action.state(job)
    with action.apply(job, None):
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(RuntimeError, match="was not undone"):
            action.verify_undone(job, before)
    action.verify_undone(job, before)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch is older than 2.9")
def test_after_tf32_products_follow_the_setting_for_all_again() -> None:
    """The older setting, put back, would say "ieee" for them."""
    with Tf32Matmul().apply(Job(device="cuda"), None):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "none"
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.backends.fp32_precision = "tf32"
    try:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"


def test_tf32_is_refused_where_the_script_has_chosen() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(CannotApply, match="medium"), Tf32Matmul().apply(Job(), None):
            pass
    finally:
        torch.set_float32_matmul_precision("highest")


def test_cudnn_benchmark_is_refused_once_there_have_been_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for the algorithm that it has chosen for a shape before it looks at the flag."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    action = CudnnBenchmark()
    action.check(Job())
    with pytest.raises(CannotApply, match=r"keeps .*: put torch.backends.cudnn.benchmark = True before"):
        action.check(Job(models=[ConvNet()], device="cuda", steps=1))


def test_a_file_of_settings_sets_cudnn_benchmark_before_the_script_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    file = tmp_path / "tuned.toml"
    file.write_text('[[action]]\nname = "cudnn-benchmark"\n', encoding="utf-8")
    asked = {"allow": [], "only": [], "skip": [], "dry_run": False, "apply": str(file)}
    tuning = LiveTuning(Recorder(), tmp_path, asked)
    try:
        assert torch.backends.cudnn.benchmark
    finally:
        tuning.finish()
    assert not torch.backends.cudnn.benchmark


def test_cudnn_benchmark_is_set_and_put_back() -> None:
    action, job = CudnnBenchmark(), Job(device="cuda")
    before = action.state(job)
    with action.apply(job, None):
        assert torch.backends.cudnn.benchmark
    action.verify_undone(job, before)


def test_attention_kernels_that_the_script_has_forbidden_are_allowed_again() -> None:
    action, job = Sdpa(), Job()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert action.values(job) == [None]
        before, settings = action.state(job), action.settings(job, None)
        with action.apply(job, None):
            assert torch.backends.cuda.flash_sdp_enabled()
        action.verify_undone(job, before)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert settings == {"statement": "torch.backends.cuda.enable_flash_sdp(True)"}


def test_cudnn_can_be_asked_for_attention_first() -> None:
    action, job = Sdpa(), Job(device="cuda")
    before = action.state(job)
    with action.apply(job, CUDNN_FIRST):
        order = torch._C._get_sdp_priority_order()
        assert order[0] == CUDNN and sorted(order) == sorted(before[1])
    action.verify_undone(job, before)


def test_a_torch_without_a_private_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_sdp_priority_order")
    with pytest.raises(CannotApply, match="_get_sdp_priority_order"):
        Sdpa().check(Job(device="cuda"))
