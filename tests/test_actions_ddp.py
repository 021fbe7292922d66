"""The actions that change what the ranks of a job send each other, on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from diagnose.actions import _ddp_rounds
from diagnose.actions._ddp_rounds import InRounds
from diagnose.actions._shadow import compare_gradients
from diagnose.actions.base import CannotApply, NotYet
from diagnose.actions.ddp_bucket_size import DdpBucketSize
from diagnose.actions.no_sync import NoSync
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from tests.loops import begin
from tests.running import run_ranks

pytest_plugins = ("tests.group_of_one",)

BUCKETS, LOOKS_FOR_UNUSED, IS_STATIC, HOOK = range(4)
"""What a reducer says of itself."""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    return [json.loads(ended.stdout) for ended in run_ranks("-m", "tests.scripts.ddp_actions")]


@pytest.fixture
def scenarios(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    scenarios: dict[str, dict[str, Any]] = ranks[0]["scenarios"]
    return scenarios


def test_weights_are_equal_on_all_ranks_whatever_is_switched(ranks):
    first, second = (rank["scenarios"] for rank in ranks)
    assert {name: each["ours"] for name, each in first.items()} == {
        name: each["ours"] for name, each in second.items()
    }


@pytest.mark.parametrize(
    "name",
    [
        "ddp-bucket-size",
        "ddp-bucket-size of views",
        "static-graph",
        "find-unused-off",
        "no-sync of one batch",
    ],
)
def test_between_two_ranks_the_weights_are_those_of_the_script_alone(scenarios, name):
    assert scenarios[name]["ours"] == scenarios[name]["alone"]


def test_each_reducer_got_its_new_settings(scenarios):
    def said(name: str, what: int) -> set[Any]:
        return {each[what] for each in scenarios[name]["said"]}

    assert max(said("ddp-bucket-size", BUCKETS)) >= 4, "of 4 MiB, at 1 MiB each"
    assert said("static-graph", IS_STATIC) == {True}
    assert said("static-graph", LOOKS_FOR_UNUSED) == {False}
    assert said("find-unused-off", LOOKS_FOR_UNUSED) == {False}
    assert said("ddp-bf16-hook", HOOK) == {"averaged_in_bf16"}


def test_bfloat16_changes_the_weights_a_little(scenarios):
    assert 0 < scenarios["ddp-bf16-hook"]["distance"] < 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "no-sync",
        "no-sync of unknown length",
        "no-sync with a look on one rank",
        "no-sync with another optimizer",
    ],
)
def test_one_average_a_step_gives_the_same_weights_but_for_rounding(scenarios, name):
    assert 0 < scenarios[name]["distance"] < 1e-6


def test_all_averages_but_the_last_of_each_step_are_left_out(scenarios):
    # Prepared at the third step, it looks at four more; the seventh is short and ends the epoch. In the
    # next one two of three are left out in six steps, and none in the short one.
    assert scenarios["no-sync"]["not_averaged"] == 12
    # There, only the optimizer tells that the last step is short.
    assert scenarios["no-sync of unknown length"]["not_averaged"] >= 6
    assert scenarios["no-sync of one batch"]["not_averaged"] == 0


def test_a_call_without_a_pass_on_one_rank_changes_nothing_of_what_is_averaged(ranks):
    told = [rank["scenarios"]["no-sync with a look on one rank"]["not_averaged"] for rank in ranks]
    assert told == [14 + 7, 14], "seven looks"


def test_buffers_go_to_all_ranks_before_each_pass_as_ever(ranks):
    """Each rank sees other data: what its own batch norm has counted is not what the first rank has."""
    told = [rank["scenarios"]["no-sync with batch norm"] for rank in ranks]
    assert all(each["not_averaged"] == 14 and each["buffers"] < 1e-6 for each in told), told


def sam(step: int, number: int, model: nn.Module) -> None:
    """Sharpness-aware minimization: the second pass is made where the gradient of the first leads."""
    if number < PASSES:
        with torch.no_grad():
            for p in model.parameters():
                p.data.add_(0.05 * p.grad)
        model.zero_grad()


def climb(step: int, number: int, model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.grad)


def clip_each(step: int, number: int, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_later(step: int, number: int, model: nn.Module) -> None:
    if step > LATER:
        clip_each(step, number, model)


def replace(step: int, number: int, model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad.clamp(-1, 1)


def only_look(step: int, number: int, model: nn.Module) -> None:
    sum(p.grad.norm() for p in model.parameters()).item()


PASSES, LATER = 3, 8


def accumulated(between: Callable[[int, int, nn.Module], None], steps: int) -> tuple[Any, int, str]:
    """Trains on sums of passes; returns what was prepared, the passes that were not averaged, and why the
    action was refused."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job, action, refusal = Job(models=[model], optimizers=[optimizer]), NoSync(), ""
    not_averaged = 0

    def call(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        nonlocal not_averaged
        not_averaged += not model.require_backward_grad_sync
        return model(rows)

    with action.prepare(job, None) as prepared, ExitStack() as applied:
        for step in range(1, steps + 1):
            for number in range(1, PASSES + 1):
                (route,) = job.routes[id(model)]
                route(call, (model, torch.randn(3, 4)), {}).square().mean().backward()
                between(step, number, model)
            optimizer.step()
            optimizer.zero_grad()
            for ends in job.on_step:
                ends()
            if step == action.learning_steps:
                try:
                    applied.enter_context(action.apply(job, prepared))
                except CannotApply as error:
                    refusal = str(error)
        return prepared, not_averaged, refusal


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    "between, reason",
    [
        (sam, "gradients are changed between two passes of a step, as by clipping"),
        (climb, "parameters are changed between two passes of a step"),
        (clip_each, "gradients are changed between two passes of a step, as by clipping"),
        (replace, "gradients are changed between two passes of a step, as by clipping"),
    ],
)
def test_passes_that_are_no_plain_sum_are_averaged_as_ever(between, reason):
    _, not_averaged, refusal = accumulated(between, 6)
    assert (refusal, not_averaged) == (reason, 0)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("between", [lambda *_: None, only_look])
def test_passes_that_only_add_up_are_averaged_once_a_step(between):
    prepared, not_averaged, refusal = accumulated(between, 6)
    assert (refusal, not_averaged) == ("", 2 * (PASSES - 1))
    assert NoSync().why_not_stay(prepared) == ""


@pytest.mark.usefixtures("group_of_one")
def test_a_loop_that_clips_each_batch_from_some_step_on_makes_it_go():
    prepared, not_averaged, refusal = accumulated(clip_later, LATER + 1)
    assert not refusal and not_averaged
    assert "as by clipping" in NoSync().why_not_stay(prepared)


@pytest.mark.usefixtures("group_of_one")
def test_it_is_not_in_force_before_it_has_seen_some_steps():
    job = Job(models=[DistributedDataParallel(nn.Linear(2, 2))])
    action = NoSync()
    with action.prepare(job, None) as prepared, pytest.raises(NotYet), action.apply(job, prepared):
        """Never entered."""


@pytest.mark.usefixtures("group_of_one")
def test_epochs_of_another_length_make_it_go_and_a_look_at_another_loader_does_not():
    job, action = Job(models=[DistributedDataParallel(nn.Linear(2, 2))]), NoSync()

    def epoch(num_batches: int) -> Any:
        return begin(job, DataLoader(range(num_batches), batch_size=None))

    batches = epoch(12)
    next(batches)
    with action.prepare(job, None) as prepared:
        assert action.alike(prepared) == "11 of 12 batches are left"
        epoch(9)  # a look; the epoch goes on
        list(batches)
        list(epoch(12))
        assert action.why_not_stay(prepared) == ""
        epoch(9)
        assert action.why_not_stay(prepared) == "epochs do not all have the same number of batches"


def test_what_cannot_be_changed_is_refused_in_words(ranks):
    assert ranks[0]["refusals"] == {
        "none wrapped": "no model of the loop is wrapped in DistributedDataParallel",
        "own hook": "the script has its own communication hook (allreduce_hook)",
        "half": "gradients are not all float32: torch.float16",
        "off already": "find_unused_parameters is off already",
        "static already": "the script has set static_graph itself",
        "static with own no_sync": (
            "the script leaves out averages itself, and a static graph begins with one"
        ),
        "one batch": "each step takes one batch",
        "own no_sync": "the script leaves out averages itself",
        "two models": "several models or optimizers take turns: which pass is a step's last is unclear",
        "unused": "find_unused_parameters or static_graph expect every pass to be averaged",
    }


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("peak, refused", [(90, False), (99, True)])
def test_a_fresh_reducer_may_take_what_the_allocator_of_its_gpu_keeps(monkeypatch, peak, refused):
    model = DistributedDataParallel(nn.Linear(512, 512))
    model.device_type = "cuda"
    stats = {
        "allocated_bytes": {"all": {"current": 0, "peak": peak << 20}},
        "reserved_bytes": {"all": {"current": 100 << 20, "peak": 100 << 20}},
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    refusal = pytest.raises(CannotApply, match=r"^a fresh reducer needs 1 MiB, and 1 MiB are free$")
    with refusal if refused else nullcontext():
        DdpBucketSize().check(Job(models=[model]))


def test_hooks_that_are_switched_on_again_queue_into_the_stream_that_there_was(monkeypatch):
    made: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

        def wait_stream(self, other: object) -> None:
            assert other == "the script's"

    monkeypatch.setattr(_ddp_rounds, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the script's")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    bucket = SimpleNamespace(index=lambda: 0, is_last=lambda: True)
    for place in ("cuda:0", "cuda:1", "cuda:0"):
        buffer = SimpleNamespace(is_cuda=False, device=torch.device(place))
        hook = InRounds("averaged", lambda group, bucket: iter([[]]))
        hook(None, SimpleNamespace(**vars(bucket), buffer=lambda buffer=buffer: buffer)).wait()
    assert made == [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.mark.parametrize("action", [DdpBucketSize(), NoSync()])
def test_without_a_model_the_state_is_empty_and_equal(action):
    assert action.state(Job()) == action.state(Job())


class Gathering(nn.Module):
    """Talks to the other ranks in every call, as a synchronized batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = self.body(rows).mean(0)
        dist.all_reduce(mean.detach())
        return rows * mean


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_waits_for_other_ranks_is_not_called_beside_the_training() -> None:
    model = Gathering()
    job = Job(models=[model], inputs={id(model): ((torch.randn(3, 4),), {})})
    verdict = compare_gradients(job, nullcontext(), Safety.EXACT)
    assert (verdict.ok, verdict.checked) == (False, False)
    assert verdict.reason == (
        "numerics cannot be checked: the model talks to other ranks while it is called"
    )
