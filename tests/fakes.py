"""A clock that stands still until it is told to move, and the real hooks running on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from diagnose import hooks
from diagnose.core.ledger import COLUMNS, COUNTS, SLOTS
from diagnose.core.plugins import discover
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

HOOKS = discover(hooks, Hook)
FORBIDDEN_TO_IMPORT = {"safetensors": "safetensors.torch"}
"""Packages that need not be here, and the module of theirs that a hook waits for."""

for package, module in FORBIDDEN_TO_IMPORT.items():
    if importlib.util.find_spec(package) is None:
        HOOKS = {name: hook for name, hook in HOOKS.items() if hook.requires != module}
for hook in HOOKS.values():
    importlib.import_module(hook.requires)


class FakeClock:
    """Nanoseconds that pass only where a test spends them."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, time_ns: int) -> None:
        self.now_ns += time_ns

    def __deepcopy__(self, memo: object) -> FakeClock:
        return self  # a copied model lives in the same time


@dataclass
class Step:
    """One recorded step: its counts, and the slots that time was charged to."""

    end_ns: int = 0
    samples: int = 0
    tokens: int = 0
    backward_passes: int = 0
    spans: int = 0
    times: dict[str, int] = field(default_factory=dict)


@contextmanager
def measured(clock: Callable[[], int], *names: str, **options: Any) -> Iterator[Recorder]:
    """Installs the named hooks, or all, with a recorder that runs on `clock`."""
    recorder = Recorder(**options)
    recorder.clock = clock
    with ExitStack() as stack:
        for name in names or HOOKS:
            if name not in HOOKS:
                pytest.skip(f"{name}: what it hooks is not installed")
            stack.enter_context(HOOKS[name].install(recorder))
        yield recorder


@contextmanager
def one_step(recorder: Recorder) -> Iterator[Step]:
    """What happens inside is one step, marked by hand; the step is filled in at its end."""
    recorder.step_marked()
    step = Step()
    yield step
    recorder.step_marked()
    (recorded,) = steps_of(recorder)
    vars(step).update(vars(recorded))


def steps_of(recorder: Recorder) -> list[Step]:
    """The finished steps that have not been taken yet."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in recorder.log.take_rows(1_000_000)]
    return [
        Step(**{name: row[name] for name in COUNTS}, times={slot: row[slot] for slot in SLOTS if row[slot]})
        for row in rows
    ]


def tell_of_pass(recorder: Recorder, loss: torch.Tensor) -> None:
    """Tells the hooks, as the one of autograd does, that a backward pass is about to begin at this loss."""
    assert recorder.looks.on_backward
    for look in recorder.looks.on_backward:
        look((loss,))


class SlowData(Dataset[Any]):
    """Rows that take some time to fetch."""

    def __init__(self, clock: FakeClock, num_rows: int, fetch_ns: int) -> None:
        self.clock, self.num_rows, self.fetch_ns = clock, num_rows, fetch_ns

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.spend(self.fetch_ns)
        return torch.full((4,), float(index))


class SlowModel(nn.Module):
    """A linear layer whose calls and whose gradients take some time."""

    def __init__(self, clock: FakeClock, forward_ns: int = 0, backward_ns: int = 0) -> None:
        super().__init__()
        self.clock, self.forward_ns, self.backward_ns = clock, forward_ns, backward_ns
        self.layer = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.clock.spend(self.forward_ns)
        out: torch.Tensor = self.layer(rows)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.clock.spend(self.backward_ns))
        return out


class SlowOptimizer(torch.optim.SGD):
    """SGD whose step takes some time."""

    def __init__(self, clock: FakeClock, model: nn.Module, step_ns: int) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.clock, self.step_ns = clock, step_ns

    def step(self, closure: Any = None) -> Any:
        self.clock.spend(self.step_ns)
        return super().step(closure)
