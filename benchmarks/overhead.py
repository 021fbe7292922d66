"""What measuring costs: one loop bare, under `diagnose`, TraceML and torch.profiler, in turn in one run.

    python benchmarks/overhead.py [--rounds 5] [--step-ms 1 10 100] [--device cuda] [--markdown FILE]

Three costs, kept apart, since one hides another: main-thread time per step, seconds that start and end add,
and whether all steps were completed. Tools alternate within every round, so that a drift of the machine
hits all alike; the differences are taken within the round; median and range over rounds are printed.
Other work on the machine makes some stretches of a run dear, so a run counts as the mean over its eighths,
and an eighth as the lower quartile of its blocks of steps: what a tool costs at some time stays in. The
plain mean stands beside it, with all that other work added to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("overhead_job.py")
STEPS = {1: 8000, 10: 800, 100: 80}
TOOLS = ("bare", "diagnose", "traceml", "torch.profiler")
TOLD = ("cpu_us", "wall_us", "outside_s", "error")
"""What is printed of each round as it ends, should there be no time for the others."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--steps", type=int, help="of each run (default: about 8 s of a slow core)")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--device", default="cpu", help="where the job trains")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    tools = [tool for tool in args.tools if tool != "traceml" or importlib.util.find_spec("traceml_ai")]
    failed = False
    lines = header(args.rounds, args.device, missing=set(args.tools) - set(tools))
    for step_ms in args.step_ms:
        rounds, steps = [], args.steps or STEPS[step_ms]
        for number in range(args.rounds):
            # The order rotates, so that none always runs after the same neighbour.
            order = tools[number % len(tools) :] + tools[: number % len(tools)]
            rounds.append({tool: run(tool, step_ms, steps, args.device) for tool in order})
            told = [{name: each[name] for name in TOLD if name in each} for each in rounds[-1].values()]
            said = json.dumps(dict(zip(rounds[-1], told, strict=True)))
            failed = failed or any("error" in each for each in rounds[-1].values())
            print(f"{step_ms} ms, round {number + 1} of {args.rounds}: {said}", file=sys.stderr, flush=True)
        lines += [row(tool, step_ms, rounds) for tool in tools]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    return int(failed)


def run(tool: str, step_ms: int, steps: int, device: str) -> dict[str, Any]:
    """Runs the job once under a tool; returns its own figures and the whole process's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = ["--step-ms", str(step_ms), "--steps", str(steps), "--tool", tool]
        job += ["--device", device, "--out", str(out)]
        command = {
            "diagnose": [sys.executable, "-m", "diagnose", "run", "--run-dir", folder, str(JOB), *job],
            "traceml": [traceml(), "run", "--logs-dir", folder, str(JOB), "--args", *job],
        }.get(tool, [sys.executable, str(JOB), *job])
        root = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        seconds = time.perf_counter() - begun
        if not out.exists():
            return {"error": done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]}
        figures: dict[str, Any] = json.loads(out.read_text())
    cpu, wall = figures.pop("cpu_ns"), figures.pop("wall_ns")
    return figures | {
        "cpu_us": undisturbed(cpu) / 1000,
        "cpu_mean_us": (cpu[-1] - cpu[0]) / (len(cpu) - 1) / 1000,
        "wall_us": statistics.median(b - a for a, b in itertools.pairwise(wall)) / 1000,
        "outside_s": seconds - figures["loop_s"],
    }


EIGHTHS = 8
BLOCKS = 20
"""Blocks of steps in an eighth of a run."""


def undisturbed(times_ns: list[int]) -> float:
    """Returns the time per step of a run, as described above, from a clock's readings after each step."""
    steps = max(1, len(times_ns) // (EIGHTHS * BLOCKS))
    blocks = [(b - a) / steps for a, b in itertools.pairwise(times_ns[::steps])]
    ends = [i * len(blocks) // EIGHTHS for i in range(EIGHTHS + 1)]
    eighths = [blocks[a:b] for a, b in itertools.pairwise(ends)]
    return statistics.mean(statistics.quantiles(eighth, n=4)[0] for eighth in eighths)


def traceml() -> str:
    return str(Path(sys.executable).with_name("traceml"))


def row(tool: str, step_ms: int, rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Formats one tool's differences to the bare loop of the same round."""
    failed = [r[each]["error"] for each in (tool, "bare") for r in rounds if "error" in r[each]]
    if failed:
        return f"| {step_ms} ms | {tool} | failed: {failed[0][0][:60]} | | | | |"
    cells = []
    for key, digits in (("cpu_us", 0), ("cpu_mean_us", 0), ("wall_us", 0), ("outside_s", 2)):
        if tool == "bare":
            values = [r[tool][key] for r in rounds]
            cells.append(spread(values, digits))
        else:
            cells.append(spread([r[tool][key] - r["bare"][key] for r in rounds], digits, sign="+"))
    steps = min(r[tool]["steps"] for r in rounds)
    same = all(r[tool]["loss"] == r["bare"]["loss"] for r in rounds)
    return f"| {step_ms} ms | {tool} | {' | '.join(cells)} | {steps}{'' if same else ', other loss'} |"


def spread(values: list[float], digits: int, sign: str = "") -> str:
    """Formats the median and the range of some values."""
    middle = statistics.median(values)
    return f"{middle:{sign},.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def header(rounds: int, device: str, missing: set[str]) -> list[str]:
    import torch

    trains_on = "no GPU" if device == "cpu" else torch.cuda.get_device_name(device)
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, {trains_on}, Python {platform.python_version()}"
    )
    return [
        "# What measuring costs",
        "",
        f"`python benchmarks/overhead.py`, {date.today()}, {machine}, torch {torch.__version__}; {rounds} "
        "interleaved rounds, median and range. The bare rows are absolute, all others what the tool adds "
        "to the bare run of its round. TraceML runs with its step context added to the script, as its "
        "documentation asks; torch.profiler on the CPU, in cycles of 50 steps.",
        *([f"Not installed, not run: {', '.join(sorted(missing))}."] if missing else []),
        "",
        "| step | tool | main-thread CPU us/step | plain mean | wall us/step | seconds besides the loop "
        "| steps |",
        "|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main())
