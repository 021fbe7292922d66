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
