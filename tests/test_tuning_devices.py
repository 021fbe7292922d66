"""What tuning asks of GPUs, by their numbers; the GPUs are made up."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._careful import state_restorer
from diagnose.actions._memory import free_at_peak, free_share
from diagnose.actions.autocast_bf16 import AutocastBf16
from diagnose.actions.autocast_fp16 import AutocastFp16
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.tf32_matmul import Tf32Matmul
from diagnose.core.job import Job
from diagnose.hooks import _allocator
from diagnose.hooks._recorder import Recorder
from diagnose.launch.tuning import LiveTuning
from tests.simulated_job import Change, Machine, controller, train
from tests.test_run_tuning import NOTHING_ASKED

FIRST, SECOND, THIRD = (torch.device("cuda", index) for index in range(3))
GIB = 1 << 30


class On:
    """A parameter, as far as anybody asks where it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Spread(nn.Module):
    """A model with its parameters on the second GPU, then the third."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from (On(SECOND), On(THIRD))


class Steps:
    """An optimizer that steps a model."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were waited for."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", found.append)
    return found


@pytest.fixture
def tuning(tmp_path: Path) -> Iterator[LiveTuning]:
    live = LiveTuning(Recorder(), tmp_path, NOTHING_ASKED)
    yield live
    live.finish()


def test_every_gpu_that_is_trained_on_is_waited_for_and_no_other(tuning, waited):
    model = Spread()
    optimizer = Steps(model)
    tuning._recorder.met.modules.append(weakref.ref(model))
    tuning._recorder.met.optimizers.append(weakref.ref(optimizer))
    tuning._look()
    assert (tuning._job.device, tuning._job.torch_device) == ("cuda", SECOND)
    tuning._synchronize()
    assert sorted(map(str, waited)) == ["cuda:1", "cuda:2"]


def test_nobody_waits_for_a_cpu(tuning, waited):
    model = nn.Linear(2, 2)
    optimizer = Steps(model)
    tuning._recorder.met.modules.append(weakref.ref(model))
    tuning._recorder.met.optimizers.append(weakref.ref(optimizer))
    tuning._look()
    tuning._synchronize()
    assert waited == []


def test_between_two_trainings_the_job_is_known_to_be_so(tuning):
    tuning._look()
    assert not tuning._job.is_between, "nothing has been trained yet"
    model = nn.Linear(2, 2)
    tuning._recorder.met.model_appears(model)
    tuning._look()
    assert not tuning._job.is_between
    tuning._forget()
    del model
    tuning._look()
    assert tuning._job.is_between


@pytest.mark.parametrize("action", [AutocastBf16(), Tf32Matmul()], ids=lambda action: type(action).__name__)
def test_the_gpu_that_the_model_is_on_must_be_able_to(action: Action, monkeypatch):
    capabilities = {FIRST: (9, 0), None: (9, 0), SECOND: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capabilities[device])
    job = Job(models=[nn.Linear(2, 2)], device="cuda", torch_device=SECOND)
    with pytest.raises(CannotApply, match="this GPU"):
        action.check(job)
    job.torch_device = FIRST
    action.check(job)


@pytest.mark.parametrize(
    "action", [AutocastBf16(), AutocastFp16()], ids=lambda action: type(action).__name__
)
def test_products_are_timed_on_the_gpu_that_the_model_is_on(action: Any, monkeypatch):
    current, timed = [FIRST], []

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        before, current[0] = current[0], one
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    module = sys.modules[type(action).__module__]
    monkeypatch.setattr(module, "refuse_slower", lambda kind, dtype: timed.append(current[0]))
    monkeypatch.setattr(module, "LossScale", lambda *_: timed.append(current[0]), raising=False)
    with action.prepare(Job(device="cuda", torch_device=SECOND), None):
        assert current == [FIRST]
    assert set(timed) == {SECOND}


def test_a_factor_for_the_gradients_of_several_gpus_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(CannotApply, match="spread over several devices"):
        AutocastFp16().check(Job(models=[model], device="cuda"))


def test_a_model_that_is_called_again_draws_the_same_on_every_gpu(monkeypatch):
    states = {FIRST: 1, SECOND: 2}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda kept, device: states.update({device: kept}))
    restore = state_restorer(nn.Linear(2, 2))
    states[SECOND] = 3
    restore()
    assert states == {FIRST: 1, SECOND: 2}


# -- memory


class Allocators:
    """What torch's allocators of two GPUs say; those of the first are full of somebody else's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.levels = {FIRST.index: [79 * GIB, 79 * GIB], SECOND.index: [10 * GIB, 20 * GIB]}
        self.reserved, self.ooms, self.retries = 24 * GIB, 0, 0
        self.allowed = 1.0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: self.allowed)
        monkeypatch.setattr(_allocator, "_ours", defaultdict(dict))
        monkeypatch.setattr(_allocator, "_peaks", defaultdict(dict))

    def stats(self, index: int) -> dict[str, Any]:
        current, peak = self.levels[index]
        return {
            "num_ooms": self.ooms,
            "num_alloc_retries": self.retries,
            "allocated_bytes": {"all": {"current": current, "peak": peak}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved}},
        }

    def need(self, num_bytes: int) -> None:
        """The second GPU holds so much for a moment, or does not have it."""
        if num_bytes > 80 * GIB:
            self.retries += 1
            self.ooms += 1
            raise torch.OutOfMemoryError
        levels = self.levels[SECOND.index]
        levels[1] = max(levels[1], num_bytes)


@pytest.fixture
def allocators(monkeypatch: pytest.MonkeyPatch) -> Allocators:
    return Allocators(monkeypatch)


JOB = Job(device="cuda", torch_device=SECOND)


def test_memory_is_that_of_the_models_gpu(allocators):
    assert free_share(JOB) == 0.75
    assert free_at_peak(JOB) == 54 * GIB


@pytest.mark.parametrize("allowed, free", [(0.5, 20), (0.3, 4), (0.2, 4)])
def test_memory_is_no_more_than_the_script_has_told_its_allocator_to_take(allocators, allowed, free):
    allocators.allowed = allowed
    assert free_share(JOB) == pytest.approx(1 - 20 / (80 * allowed))
    assert free_at_peak(JOB) == free * GIB


def test_an_allocator_that_tells_nothing_is_no_free_memory(allocators, monkeypatch):
    def refuses(index: int) -> None:
        raise RuntimeError("does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuses)
    with pytest.raises(CannotApply, match="not known"):
        free_share(JOB)


def test_the_peak_of_a_numerics_check_is_not_the_scripts(allocators):
    machine = Machine()
    control = controller(
        machine, [Change(machine, "one", 0.5, touches="model")], uncounted=_allocator.uncounted
    )
    compare, peaks = control._world.check_numerics, []

    def check(job: Job, installed: Any) -> Any:
        allocators.need(40 * GIB)
        peaks.append(free_share(JOB))
        return compare(job, installed)

    object.__setattr__(control._world, "check_numerics", check)
    train(machine, control, 300)
    assert machine.outcomes() == {"one": "kept"}
    assert peaks == [0.75] and free_share(JOB) == 0.75
    allocators.need(60 * GIB)
    assert free_share(JOB) == 0.25, "the script's own, beyond ours, is told"


def test_a_second_check_is_left_out_as_well(allocators):
    for gib in (40, 60, 50):
        with _allocator.uncounted():
            allocators.need(gib * GIB)
        assert _allocator.read(SECOND.index)["peak_allocated_bytes"] == 20 * GIB


def test_what_stays_of_our_own_work_is_needed(allocators):
    with _allocator.uncounted():
        allocators.need(40 * GIB)
        allocators.levels[SECOND.index][0] = 30 * GIB
    assert _allocator.read(SECOND.index)["peak_allocated_bytes"] == 30 * GIB


def test_memory_that_our_own_work_lacks_is_not_the_scripts_lack(allocators):
    allocators.ooms = allocators.retries = 2
    with pytest.raises(torch.OutOfMemoryError), _allocator.uncounted():
        try:
            allocators.need(100 * GIB)
        finally:
            during = _allocator.read(SECOND.index)  # as the thread does that writes the records
    after = _allocator.read(SECOND.index)
    assert (during["ooms"], after["ooms"], after["retries"]) == (2, 2, 2)
    with pytest.raises(torch.OutOfMemoryError):
        allocators.need(100 * GIB)
    assert _allocator.read(SECOND.index)["ooms"] == 3
    allocators.ooms = 0  # the script resets the counts
    assert _allocator.read(SECOND.index)["ooms"] == 0


# -- graphs


def test_while_the_script_captures_a_graph_nothing_is_done(tuning, waited, monkeypatch):
    told: list[bool] = []
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    asked: list[int] = []
    stands_in = SimpleNamespace(
        rests_until=0,
        rests=asked.append,
        boundary=lambda step, aside, *more: told.append(aside),
        finish=lambda: None,
        state="observing",
    )
    monkeypatch.setattr(tuning, "_controller", stands_in)
    tuning._boundary()
    assert told == asked == waited == []
    capturing = False
    for _ in range(2):
        tuning._boundary()
    assert told == [True, False], "the first step that is told of took as long as two"
