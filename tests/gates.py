"""Toy repositories for tests of the gate, and a stand-in for a training of known step time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from diagnose.gate.measure import RunPlan
from diagnose.gate.result import MeasuredRun, Metric, Side, TrainingFailed

STAND_IN = """\
import random, sys, zlib
STEP_MS, SCATTER, EXIT = {step_ms}, {scatter}, {exit_code}
if EXIT:
    print("ValueError: no such file: data.bin", file=sys.stderr)
    sys.exit(EXIT)
print(STEP_MS * random.Random(zlib.crc32(sys.argv[1].encode())).lognormvariate(0, SCATTER))
"""

STEADY, WILD = 0.005, 0.6


def git(folder: Path, *arguments: str) -> str:
    """Runs git as a user without any configuration of their own."""
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def stand_in(step_ms: float, *, scatter: float = STEADY, exit_code: int = 0) -> str:
    """A script whose steps take so long, scattered from run to run by its name."""
    return STAND_IN.format(step_ms=step_ms, scatter=scatter, exit_code=exit_code)


def commit(folder: Path, script: str, *, path: str = "train.py") -> str:
    """Writes the script and commits it; returns the hash."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(script)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "a change", "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


def repository(folder: Path, *scripts: str) -> Path:
    """A repository with one commit of `train.py` per script, on the branch `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for script in scripts:
        commit(folder, script)
    return folder


def measured_stand_in(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
    """Runs the stand-in, a real process in the real worktree, and makes figures of what it prints."""
    command = [sys.executable, "-S", "-E", *side.command, name]
    done = subprocess.run(command, cwd=side.root, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise TrainingFailed(
            name,
            f"{name} ended with exit code {done.returncode}",
            exit_code=done.returncode,
            signal=None,
            last_lines=tuple(done.stderr.splitlines()),
        )
    step_ms = float(done.stdout)
    (folder / name).mkdir(parents=True)
    return MeasuredRun(
        name=name,
        folder=folder / name,
        root=side.root,
        figures={
            Metric.SAMPLES_PER_S: 32_000 / step_ms,
            Metric.STEP_MS: step_ms,
            Metric.CPU_MS: step_ms,
            Metric.PEAK_MEMORY: 2.0**28,
            Metric.STARTUP: 1.0,
        },
        num_steps=plan.steps,
        warmup=20,
        step_s=step_ms / 1000,
        startup_s=1.0,
        wall_s=0.1,
    )
