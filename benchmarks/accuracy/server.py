"""Runs a training script under `diagnose` and returns what was said, and what a clock of our own saw.

A job is a fork of this process, which has imported torch but never computed with it: a start costs
milliseconds instead of seconds. The fork attaches, runs the file as `__main__` and detaches. `real_run`
takes the way of a user instead, and is the only one for several ranks. `in_turn` compares two jobs, without
`diagnose`: each takes a few steps while the other waits, so that both see the same machine.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diagnose
from accuracy.clocked import on_rounds
from diagnose.analysis.profile import load_profile
from diagnose.core.profile import Profile
from diagnose.rules import diagnosed

ROOT = Path(__file__).parents[2]
CLOCKED = Path(__file__).with_name("clocked.py")

WARMUP = 10
"""Steps before our clock starts. A script with a fault in every tenth step runs 11 steps more than a
multiple of ten: the clock then sees as many of them as belong to its steps."""

TIMEOUT_S = 120

TURN_NS = 100_000_000
"""Two jobs take turns after so long: a shared machine changes within seconds."""

SPIN_S = 0.02
"""OpenMP's threads go on spinning for some milliseconds when a job has nothing for them, on a CPU that the
other job needs: its turn begins after that. Without it steps of both came out 5 % longer."""

MORE, ENDED = b"+", b"."


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
        on_rounds(lambda: self.ended_ns.append(time.perf_counter_ns()))

    def step_ms(self) -> float:
        """Returns the mean time of a step after the warm-up."""
        ended = self.ended_ns[WARMUP:]
        if len(ended) < 2:
            raise JobFailed(f"only {len(self.ended_ns)} optimizer steps")
        return (ended[-1] - ended[0]) / (len(ended) - 1) / 1e6


class Turns:
    """One of two jobs that take turns: it notes the time of its steps, and waits while the other works.

    Args:
        mine: A pipe's end at which the other says that it is this job's turn.
        other: Where to say that it is the other's.
    """

    def __init__(self, mine: int, other: int) -> None:
        self._mine, self._other = mine, other
        self._alone = False
        self._begun_ns = self._turn_ns = 0
        self.times_ns: list[int] = []

    def begin(self) -> None:
        """Waits for the first turn."""
        self._alone = os.read(self._mine, 1) == ENDED
        self._begun_ns = self._turn_ns = time.perf_counter_ns()

    def stepped(self) -> None:
        """The optimizers have stepped."""
        now = time.perf_counter_ns()
        self.times_ns.append(now - self._begun_ns)
        if not self._alone and now - self._turn_ns > TURN_NS:
            time.sleep(SPIN_S)
            os.write(self._other, MORE)
            self.begin()
        else:
            self._begun_ns = now

    def end(self) -> None:
        """Leaves the machine to the other."""
        os.write(self._other, ENDED)

    def step_ms(self) -> float:
        """Returns the mean time of a step after the warm-up."""
        times_ns = self.times_ns[WARMUP + 1 :]
        if not times_ns:
            raise JobFailed(f"only {len(self.times_ns)} optimizer steps")
        return sum(times_ns) / len(times_ns) / 1e6


def forked_run(script: Path, arguments: Sequence[str]) -> Job:
    """Runs the script in a fork of this process."""
    clock = Clock()

    def train() -> dict[str, Any]:
        clock.install()
        diagnose.attach("run")
        runpy.run_path(str(script), run_name="__main__")
        profile = diagnose.detach()
        return {"step_ms": clock.step_ms(), **said(profile)}

    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        fork = Fork.of(script, arguments, Path(folder), train)
        return job_of(fork.result())


def in_turn(script: Path, off: Sequence[str], on: Sequence[str]) -> tuple[float, float]:
    """Runs two jobs of a script that take turns.

    Returns:
        Mean milliseconds of a step of each.
    """
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        (first, to_first), (second, to_second) = os.pipe(), os.pipe()
        forks = []
        for name, arguments, mine, other in (
            ("off", off, first, to_second),
            ("on", on, second, to_first),
        ):
            turns = Turns(mine, other)

            def train(turns: Turns = turns) -> dict[str, Any]:
                turns.begin()
                on_rounds(turns.stepped)
                try:
                    runpy.run_path(str(script), run_name="__main__")
                finally:
                    turns.end()
                return {"step_ms": turns.step_ms()}

            forks.append(Fork.of(script, arguments, Path(folder, name), train))
        os.write(to_first, MORE)
        try:
            off_ms, on_ms = (fork.result()["step_ms"] for fork in forks)
        finally:
            for fork in forks:
                fork.stop()
            for end in (first, to_first, second, to_second):
                os.close(end)
        return off_ms, on_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A job that runs in a fork of this process."""

    pid: int
    name: str
    out: Path
    errors: Path

    @staticmethod
    def of(
        script: Path, arguments: Sequence[str], folder: Path, train: Callable[[], dict[str, Any]]
    ) -> Fork:
        """Starts it.

        Args:
            script: What is to be run.
            arguments: Its arguments.
            folder: Where it runs.
            train: Runs it; returns what is to be known of it.
        """
        folder.mkdir(exist_ok=True)
        out, errors = folder / "job.json", folder / "stderr"
        pid = os.fork()
        if not pid:
            _be_the_job(script, arguments, out, errors, train)
        return Fork(pid=pid, name=f"{script.name} {' '.join(arguments)}", out=out, errors=errors)

    def result(self) -> dict[str, Any]:
        """Waits for its end, and returns what it said.

        Raises:
            JobFailed: If it failed.
        """
        status = _wait(self.pid)
        if status or not self.out.exists():
            words = self.errors.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise JobFailed(f"{self.name}: exit status {status}\n{words}")
        result: dict[str, Any] = json.loads(self.out.read_text(encoding="utf-8"))
        return result

    def stop(self) -> None:
        """Ends it, if it has not ended."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def job_of(verdict: dict[str, Any]) -> Job:
    """Returns the run that a dictionary of its attributes stands for."""
    findings = tuple(Named(**finding) for finding in verdict.pop("findings"))
    return Job(findings=findings, abstained=tuple(verdict.pop("abstained")), **verdict)


def _be_the_job(
    script: Path, arguments: Sequence[str], out: Path, errors: Path, train: Callable[[], dict[str, Any]]
) -> None:
    code = 1
    try:
        os.setsid()
        threading.main_thread()._set_native_id()  # Python 3.11 leaves the parent's, and no thread has it
        os.chdir(out.parent)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [str(script), *arguments]
        sys.path[0] = str(script.parent)
        out.write_text(json.dumps(train()), encoding="utf-8")
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


def real_run(script: Path, arguments: Sequence[str], *, ranks: int) -> Job:
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
