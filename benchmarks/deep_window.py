"""What each way of recording a step costs it: why a deep window counts one step and records others.

    python benchmarks/deep_window.py [--rounds 15] [--markdown PATH]

One step of a small transformer on the CPU, on one thread, bare and recorded in each way in turn, so that a
drift of the machine hits all alike; medians over the rounds, with the range, and the FLOPs that each way
says. Then what starting, stopping and writing take of a window of three steps, and what is written.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from diagnose.analysis.trace_classes import work_of
from diagnose.launch.deep_window_count import Counting
from diagnose.launch.deep_window_file import pack
from diagnose.launch.deep_window_profiler import Profiler, silent

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    step = made()
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "bare": nullcontext,
        "counted by a deep window": lambda: Counting(lambda: False, work_of),
        "FlopCounterMode": lambda: FlopCounterMode(display=False),
        "torch.profiler, as a deep window records": recorded,
        "torch.profiler with_flops, record_shapes": lambda: recorded(with_flops=True, record_shapes=True),
        "torch.profiler with_stack": lambda: recorded(with_stack=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    flops = dict.fromkeys(ways, "")
    for _ in range(3):
        step()
    Profiler().prepare()  # Kineto chooses its level of messages when it is first used, and not again
    with silent():
        for _ in range(args.rounds):
            for name, way in ways.items():
                gc.collect()
                with way() as recorder:
                    begun = time.perf_counter()
                    step()
                    times[name].append(1e3 * (time.perf_counter() - begun))
                flops[name] = said(recorder)
    lines = [
        f"{platform.machine()}, torch {torch.__version__}, one thread, {args.rounds} rounds",
        "",
        "| one step | median, ms | range, ms | times the bare step | GFLOP that it says |",
        "|---|---|---|---|---|",
    ]
    bare = statistics.median(times["bare"])
    for name, spent in times.items():
        median = statistics.median(spent)
        spread = f"{min(spent):.1f} to {max(spent):.1f}"
        lines.append(f"| {name} | {median:.1f} | {spread} | {median / bare:.2f} | {flops[name]} |")
    lines += ["", *window(step)]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def made() -> Callable[[], None]:
    """Returns a training step of some 1,000 operations."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(16, 32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def recorded(**options: bool) -> AbstractContextManager[Any]:
    return profile(activities=[ProfilerActivity.CPU], **options)


def said(recorder: Any) -> str:
    if isinstance(recorder, Counting):
        return f"{sum(each['flops'] for each in recorder.as_json()['work']) / 1e9:.3f}"
    if isinstance(recorder, FlopCounterMode):
        return f"{recorder.get_total_flops() / 1e9:.3f}"
    counted = sum(each.flops for each in recorder.key_averages()) if recorder is not None else 0
    return f"{counted / 1e9:.3f}" if counted else ""


def window(step: Callable[[], None]) -> list[str]:
    """Returns the table of a whole window."""
    with tempfile.TemporaryDirectory() as folder:
        raw, packed = Path(folder) / "t.json", Path(folder) / "t.json.gz"
        profiler = Profiler()
        moments = [time.perf_counter()]
        for part in (
            profiler.prepare,
            profiler.start,
            lambda: [step() for _ in range(STEPS)],
            profiler.stop,
        ):
            part()
            moments.append(time.perf_counter())
        profiler.save(raw)
        moments.append(time.perf_counter())
        pack(raw, packed)
        moments.append(time.perf_counter())
        took = [1e3 * (after - before) for before, after in itertools.pairwise(moments)]
        sizes = f"{raw.stat().st_size / 1e6:.1f} MB, packed {packed.stat().st_size / 1e6:.2f} MB"
    whose = {
        "make ready": "the training thread",
        "start": "the training thread",
        f"{STEPS} steps": "the training thread",
        "stop": "the training thread",
        "write": "the interpreter: no Python runs meanwhile",
        "pack": "a thread of its own",
    }
    return [
        "| part of a window | ms | whose time |",
        "|---|---|---|",
        *(f"| {name} | {ms:.1f} | {whose[name]} |" for name, ms in zip(whose, took, strict=True)),
        "",
        f"The trace: {sizes}.",
    ]


if __name__ == "__main__":
    main()
