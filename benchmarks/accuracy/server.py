"""Runs a training script under `diagnose` and returns what was said, and what a clock of our own saw.

A job is a fork of this process, which has imported torch but never computed with it: a start costs
milliseconds instead of seconds. The fork attaches, runs the file as `__main__` and detaches. `real_run`
takes the way of a user instead, and is the only one for several ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import diagnose
from diagnose.analysis.profile import load_profile
from diagnose.core.profile import Profile
from diagnose.rules import diagnosed

ROOT = Path(__file__).parents[2]
CLOCKED = Path(__file__).with_name("clocked.py")

WARMUP = 10
"""Steps before our clock starts. A script with a fault in every tenth step runs 11 steps more than a
multiple of ten: the clock then sees as many of them as belong to its steps."""

TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A finding: which rule, and how much of the step it says would be won, from 0 to 1."""

    rule: str
    lost_share: float
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run.

    Attributes:
        step_ms: Time from one optimizer step to the next, mean of all after the warm-up, by our own clock.
        findings: What was found, the most costly first.
        abstained: Rules that missed a reading.
        status: Of the profile.
    """

    step_ms: float
    findings: tuple[Named, ...]
    abstained: tuple[str, ...]
    status: str


class JobFailed(RuntimeError):
    """The script failed, or took too long; the message has its last words."""


class Clock:
    """Notes when an optimizer has stepped."""

    def __init__(self) -> None:
        self.ended_ns: list[int] = []

    def install(self) -> None:
        """Begins noting."""
        register_optimizer_step_post_hook(lambda *_: self.ended_ns.append(time.perf_counter_ns()))

    def step_ms(self) -> float:
        """Returns the mean time of a step after the warm-up."""
        ended = self.ended_ns[WARMUP:]
        if len(ended) < 2:
            raise JobFailed(f"only {len(self.ended_ns)} optimizer steps")
        return (ended[-1] - ended[0]) / (len(ended) - 1) / 1e6


def forked_run(script: Path, arguments: Sequence[str]) -> Job:
    """Runs the script in a fork of this process."""
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        out, errors = Path(folder, "job.json"), Path(folder, "stderr")
        child = os.fork()
        if not child:
            _be_thejob_of(script, arguments, Path(folder), out, errors)
        status = _wait(child)
        if status or not out.exists():
            words = errors.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise JobFailed(f"{script.name} {' '.join(arguments)}: exit status {status}\n{words}")
        return job_of(json.loads(out.read_text(encoding="utf-8")))


def job_of(verdict: dict[str, Any]) -> Job:
    """Returns the run that a dictionary of its attributes stands for."""
    findings = tuple(Named(**finding) for finding in verdict.pop("findings"))
    return Job(findings=findings, abstained=tuple(verdict.pop("abstained")), **verdict)


def _be_thejob_of(script: Path, arguments: Sequence[str], folder: Path, out: Path, errors: Path) -> None:
    code = 1
    try:
        os.setsid()
        threading.main_thread()._set_native_id()  # Python 3.11 leaves the parent's, and no thread has it
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [str(script), *arguments]
        sys.path[0] = str(script.parent)
        clock = Clock()
        clock.install()
        diagnose.attach(folder / "run")
        runpy.run_path(str(script), run_name="__main__")
        profile = diagnose.detach()
        out.write_text(json.dumps({"step_ms": clock.step_ms(), **said(profile)}), encoding="utf-8")
        code = 0
    except BaseException:  # noqa: BLE001 (whatever ends a job is said by its parent)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def said(profile: Profile) -> dict[str, Any]:
    """Returns the verdict on a profile, as JSON can hold it."""
    judged = diagnosed(profile)
    return {
        "findings": [
            {
                "rule": finding.rule,
                "lost_share": finding.lost_ns_per_step / judged.step_time_ns,
                "place": f"{Path(finding.file).name}:{finding.line}" if finding.file else "",
            }
            for finding in judged.findings
        ],
        "abstained": [abstention.rule for abstention in judged.abstained],
        "status": judged.status.value,
    }


def _wait(child: int) -> int:
    """Waits for the job to end, and ends what it left running."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return -1
    return os.waitstatus_to_exitcode(status)


def real_run(script: Path, arguments: Sequence[str], *, ranks: int = 1) -> Job:
    """Runs the script with `diagnose run`, as a user does."""
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        times = Path(folder, "times")
        several = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
        done = subprocess.run(
            [
                *(sys.executable, "-m", "diagnose", "run", "--quiet", "--run-dir", folder, "--name", "run"),
                *several,
                *(str(CLOCKED), str(times), str(script), *arguments),
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode or not times.exists():
            raise JobFailed(
                f"{script.name} {' '.join(arguments)}: {done.returncode}\n{done.stderr[-2000:]}"
            )
        return job_of({"step_ms": float(times.read_text()), **said(load_profile(Path(folder, "run")))})
