"""Whose a collective is: the loop's, or the model's and the optimizer's own."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diagnose.core.ledger import SLOT_OF
from tests.fakes import measured

NUMBER = torch.ones(1)
CALLS = "def log(number):\n    import torch.distributed as dist\n    dist.all_reduce(number)\n"


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("phase", "package", "is_own"),
    [
        ("forward", "train", True),
        ("optimizer", "torch.distributed.optim.zero_redundancy_optimizer", True),
        ("forward", "lightning.fabric.utilities.distributed", False),
        (None, "train", False),
    ],
)
def test_what_is_called_inside_of_model_and_optimizer_is_their_own(
    phase: str | None, package: str, is_own: bool
) -> None:
    names: dict[str, Any] = {"__name__": package}
    exec(CALLS, names)
    with measured(perf_counter_ns, "collectives") as recorder:
        recorder.step_marked()
        interrupted = recorder.push(SLOT_OF[phase]) if phase else None
        names["log"](NUMBER)
        if phase and interrupted is not None:
            recorder.leave(SLOT_OF[phase], interrupted)
        assert ("exchanges" in recorder.facts) is is_own
        assert not recorder.notes


def test_what_a_loop_adds_up_between_backward_and_the_optimizer_is_told_with_its_size():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                dist.all_reduce(NUMBER.clone())
                dist.all_reduce(torch.ones(5, dtype=torch.long))
            work = dist.all_reduce(torch.ones(100), async_op=True)
            before_ns = averaged(recorder)["waited_ns"]
            work.wait()
            assert averaged(recorder)["waited_ns"] > before_ns
            optimizer.step()
            dist.all_reduce(torch.ones(1000))  # of the log
        assert {**averaged(recorder), "waited_ns": 0} == {
            "elements": 2 * (2 * 36 + 100),
            "passes": 4,
            "waited_ns": 0,
        }
        assert "exchanges" not in recorder.facts
        assert not recorder.notes


def averaged(recorder: Any) -> dict[str, int]:
    """What the hook tells of sums when the records are written next."""
    for tell in recorder.looks.flushed:
        tell()
    found: dict[str, int] = recorder.facts["averaging"]
    return found
