"""Trains a little, in the way that its first argument says, and prints what it learnt to the last bit."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 30

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
called = torch.compile(model, backend="eager") if KIND == "compile" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(8 * STEPS, 32), torch.randint(0, 4, (8 * STEPS,)))
loader = DataLoader(data, batch_size=8, num_workers=2 if KIND == "workers" else 0)
total = 0.0
names: list[str] = []


def train(batch: torch.Tensor, target: torch.Tensor) -> None:
    global total
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(called(batch), target)
    loss.backward()
    optimizer.step()
    total += loss.item()


def profiled(step: int, batch: torch.Tensor, target: torch.Tensor) -> None:
    if step % 15 == 11:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            train(batch, target)
        names.extend(sorted(each.key for each in profiler.key_averages() if "addmm" in each.key))
    else:
        train(batch, target)


def children() -> str:
    return "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))


def until(happened: Callable[[], bool]) -> None:
    """Trains on until it has happened, or a minute is over."""
    ends = time.monotonic() + 60
    while not happened() and time.monotonic() < ends:
        for batch, target in loader:
            train(batch, target)
        time.sleep(0.01)


def wait(kind: str) -> None:
    """Waits for what becomes of a window; to be killed, sends itself SIGKILL as soon as that is there."""

    def is_there() -> bool:
        return any(Path(".diagnose/runs/r").glob("deep-*.window.json"))

    if kind == "killed":
        while not is_there():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    until(is_there if kind == "until-window" else lambda: bool(children()))
    until(lambda: not children())


def fail(step: int) -> None:
    if step == 8 and KIND == "killed":
        time.sleep(1.5)  # what was recorded until now is in the file
    if step == 15 and KIND == "killed":
        wait(KIND)
    if step == 12 and KIND == "raises":
        model(torch.ones(3, 5))
    if step == 12 and KIND == "interrupted":
        raise KeyboardInterrupt
    if step == 11 and KIND == "warns":
        warnings.warn("the script's own", stacklevel=1)
        torch.ones(2, requires_grad=True).grad_fn_is_none = float(torch.ones(1, requires_grad=True) * 2)


if __name__ == "__main__":
    if KIND == "bare":  # no loader: a step ends where the next forward pass begins
        for first in range(0, len(data), 8):
            train(*data[first : first + 8])
    else:
        for step, (batch, target) in enumerate(loader):
            fail(step)
            if KIND == "profiler":
                profiled(step, batch, target)
            else:
                train(batch, target)
    if KIND.startswith("until-"):
        wait(KIND)
    print(f"{total:.17g}", *names)
    print(sum(p.double().sum().item() for p in model.parameters()), file=sys.stderr)
