"""A plain training loop with a step of about 1, 10 or 100 ms, which `overhead.py` runs under each tool.

Every tool sees the same loop. TraceML gets the two additions that its documentation asks for, as it records
no step of a plain loop without them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

WIDTH = {1: 64, 10: 640, 100: 2048}
"""Width of the model's layers by the length of the step in milliseconds, on one slow core."""

SKIP = 30
"""Leading steps left out of the times."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=int, choices=WIDTH, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tool", default="bare")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    model, loader, optimizer, criterion = parts(args.step_ms, args.device)
    step, profiler = around_step(args.tool, model)

    cpu_ns: list[int] = []
    wall_ns: list[int] = []
    begun = time.perf_counter()
    with profiler as running:
        done = 0
        while done < args.steps:
            for x, y in loader:
                with step():
                    if args.device != "cpu":
                        x, y = x.to(args.device), y.to(args.device)
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()
                if hasattr(running, "step"):
                    running.step()
                cpu_ns.append(time.thread_time_ns())
                wall_ns.append(time.perf_counter_ns())
                done += 1
                if done == args.steps:
                    break
    args.out.write_text(
        json.dumps(
            {
                "cpu_ns": cpu_ns[SKIP:],
                "wall_ns": wall_ns[SKIP:],
                "loop_s": time.perf_counter() - begun,
                "steps": done,
                "loss": loss.item(),
                "pid": os.getpid(),
            }
        )
    )


def parts(
    step_ms: int, device: str = "cpu"
) -> tuple[torch.nn.Module, DataLoader, torch.optim.Optimizer, torch.nn.Module]:
    """Returns what is trained, for a step of about so many milliseconds on one thread of a CPU."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = WIDTH[step_ms]
    batch = 32
    layers = [torch.nn.Linear(width, width) for _ in range(8)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to(device)
    rows = torch.randn(64 * batch, width), torch.randint(0, 10, (64 * batch,))
    loader = DataLoader(TensorDataset(*rows), batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, loader, optimizer, torch.nn.CrossEntropyLoss()


def around_step(
    tool: str, model: torch.nn.Module
) -> tuple[Callable[[], contextlib.AbstractContextManager], contextlib.AbstractContextManager]:
    """Returns what the tool puts around a step, and around the loop."""
    if tool == "traceml":
        import traceml_ai as traceml

        traceml.init()
        return lambda: traceml.trace_step(model), contextlib.nullcontext()
    if tool == "torch.profiler":
        # With a schedule that drops each cycle's events, as an always-on profiler must.
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=49)
        activities = [torch.profiler.ProfilerActivity.CPU]
        return contextlib.nullcontext, torch.profiler.profile(activities=activities, schedule=schedule)
    return contextlib.nullcontext, contextlib.nullcontext()


if __name__ == "__main__":
    main()
