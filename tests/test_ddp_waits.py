"""The end of a backward pass in which DDP waits: measured without a trace on loss or model."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks import _recorder
from diagnose.hooks.backward import BackwardHook
from diagnose.hooks.ddp_waits import DdpWaitsHook
from diagnose.hooks.hand_written_updates import HandWrittenUpdatesHook
from tests.fakes import measured

pytest_plugins = ("tests.group_of_one",)
pytestmark = pytest.mark.usefixtures("group_of_one")

FORWARD = SLOT_OF["forward"]


@pytest.fixture
def recorder() -> Iterator[_recorder.Recorder]:
    recorder = _recorder.Recorder()
    recorder.step_marked()
    with BackwardHook().install(recorder), DdpWaitsHook().install(recorder):
        yield recorder


def meetings(recorder: _recorder.Recorder) -> int:
    recorder.log.has_rows()  # reads the log
    return len(recorder.log.meetings)


def test_each_pass_that_averages_gradients_is_a_meeting_and_those_under_no_sync_are_none(recorder):
    model = DistributedDataParallel(nn.Linear(4, 2))
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    assert meetings(recorder) == 3
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    assert meetings(recorder) == 3
    arrived, met = recorder.log.meetings[0]
    assert arrived < met


def test_sending_buffers_before_a_forward_is_a_meeting(recorder):
    def forward_in(slot: int, model: nn.Module) -> torch.Tensor:
        interrupted = recorder.push(slot)
        loss = model(torch.ones(2, 4)).sum()
        assert recorder.current == slot
        recorder.leave(slot, interrupted)
        return loss

    model = DistributedDataParallel(nn.BatchNorm1d(4))
    for passes in (1, 2):
        forward_in(FORWARD, model).backward()
        assert meetings(recorder) == 2 * passes
    without = DistributedDataParallel(nn.BatchNorm1d(4), forward_sync_buffers=False)
    forward_in(FORWARD, without).backward()
    assert meetings(recorder) == 5
    forward_in(SLOT_OF["evaluation"], model)
    assert meetings(recorder) == 5, "an evaluation's own"


def test_a_failure_of_our_own_costs_a_meeting_and_no_step(recorder, monkeypatch):
    def fail(self: Any) -> None:
        raise LookupError("arrive is broken")

    monkeypatch.setattr(_recorder.Recorder, "arrive", fail)
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    interrupted = recorder.push(FORWARD)
    loss = model(torch.ones(2, 4)).sum()
    recorder.leave(FORWARD, interrupted)
    loss.backward()
    assert meetings(recorder) == 0
    assert len(recorder.notes) == 1 and "arrive is broken" in recorder.notes[0]


def test_whether_a_pass_is_a_meeting_is_decided_where_the_model_is_called(recorder):
    """As DDP does: `no_sync` around the pass alone leaves no average out."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum()
    with model.no_sync():
        loss.backward()
    assert meetings(recorder) == 1
    with model.no_sync():
        loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    assert meetings(recorder) == 1


def test_a_pass_without_ddp_is_no_meeting(recorder):
    DistributedDataParallel(nn.Linear(4, 2)).module(torch.ones(1, 4)).sum().backward()
    nn.Linear(4, 2)(torch.ones(1, 4)).sum().backward()
    assert meetings(recorder) == 0


def test_the_loss_keeps_no_hook_and_a_graph_can_be_walked_twice(recorder):
    called: list[Any] = []
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum()
    loss.register_hook(called.append)
    loss.backward(retain_graph=True)
    assert meetings(recorder) == 1
    with model.no_sync():
        model(torch.ones(1, 4))
    loss.backward()
    assert len(called) == 2, "the script's own hook is called once a pass"
    assert meetings(recorder) == 1


def test_parameters_that_the_loop_updates_have_steps_and_meetings():
    with measured(perf_counter_ns) as recorder:
        model = DistributedDataParallel(nn.Linear(4, 2))
        for _ in range(20):
            model(torch.ones(1, 4)).sum().backward()
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None
        recorder.finish()
        assert recorder.steps >= 15
        assert meetings(recorder) >= 15
        assert len(recorder.notes) == 1, "of the steps"


def test_a_pass_that_fails_leaves_the_next_one_measured(recorder):
    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("from the script")

    model = DistributedDataParallel(nn.Linear(4, 2))
    out = model(torch.ones(1, 4))
    handle = out.register_hook(fail)
    with pytest.raises(RuntimeError, match="from the script"):
        out.sum().backward()
    handle.remove()
    model = DistributedDataParallel(nn.Linear(4, 2))
    model(torch.ones(1, 4)).sum().backward()
    assert meetings(recorder) == 1
    assert recorder.notes == type(recorder.notes)()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_within_a_pass_does_not_end_the_outer_one(recorder, reentrant: bool):
    """Reentrant checkpointing runs a backward pass inside of the backward pass."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, rows: torch.Tensor) -> Any:
            return checkpoint(self.second, self.first(rows), use_reentrant=reentrant)

    model = DistributedDataParallel(Checkpointed())
    model(torch.ones(1, 4)).sum().backward()
    assert meetings(recorder) == 1


def test_gradients_are_bit_for_bit_those_of_a_pass_that_is_not_measured(recorder):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    rows = torch.randn(16, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(rows).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    measured = gradients()
    assert meetings(recorder) == 1
    recorder.looks.on_pass.clear()
    assert all(map(torch.equal, measured, gradients()))


def test_whoever_looks_at_passes_first_keeps_no_other_from_it():
    model = DistributedDataParallel(nn.Linear(4, 1))
    recorder = _recorder.Recorder()
    with BackwardHook().install(recorder), DdpWaitsHook().install(recorder):
        DistributedDataParallel(nn.Linear(4, 1))  # whose passes are looked at from here on
        with HandWrittenUpdatesHook().install(recorder):
            for _ in range(8):
                model(torch.randn(16, 4)).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter -= 0.1 * parameter.grad
            assert any("every backward pass" in note for note in recorder.notes)
        assert len(recorder.looks.on_pass) == 1
    assert not recorder.looks.on_pass


def test_a_look_that_has_taken_itself_out_leaves_the_next_one_its_turn():
    recorder = _recorder.Recorder()
    recorder.step_marked()  # so that no update needs to be looked for
    with (
        BackwardHook().install(recorder),
        HandWrittenUpdatesHook().install(recorder),
        DdpWaitsHook().install(recorder),
    ):
        model = DistributedDataParallel(nn.Linear(4, 1))
        assert len(recorder.looks.on_pass) == 2
        model(torch.randn(16, 4)).sum().backward()
        assert len(recorder.looks.on_pass) == 1
        assert meetings(recorder) == 1
