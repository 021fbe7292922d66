"""Makes one short run of a training command, or several that take turns."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diagnose
from diagnose.analysis.profile import read_logs
from diagnose.core.units import NS_PER_S
from diagnose.gate.ended_badly import failed, last_lines
from diagnose.gate.figures import figures_of, machine_state
from diagnose.gate.in_turns import TURN_S, take_turns
from diagnose.gate.instructions import count_of, counting
from diagnose.gate.interpreter import split
from diagnose.gate.result import MeasuredRun, Metric, Side
from diagnose.gate.steps import MIN_WARMUP
from diagnose.store.runs import Stops, keep_stops, read_manifest

START = """
import ctypes, os, resource, sys
sys.path[:] = filter(None, [{package!r}, *sys.path])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
def end(code, end=os._exit):
    with open({peak!r}, "w") as file:
        file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
    end(code)
os._exit = end
from diagnose.cli.main import main
main()
"""
"""Starts our own command in a folder that may hold modules of any name, even ours: `python -m` would prefer
them. And asks Linux for SIGTERM when the gate dies, however it dies: no run outlives it.

As it ends, by `os._exit`, it writes down how much memory its largest child used. What Linux tells the gate
is no less than what the gate itself used when it started the run: within pytest, that may be far more."""

KEPT_SETTING = "nproc_per_node"
"""What the gate's runs take from the environment, or from `[tool.diagnose]` of their version; any other
setting would make them something else."""

GRACE_S = 5.0
"""So long a run that is out of time may take to end by itself."""

MAXRSS_UNIT = 1.0 if sys.platform == "darwin" else 1024.0
"""Bytes that the memory used is counted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How long one run is.

    Attributes:
        steps: Steps to measure, after the warm-up.
        warmup: Leading steps to leave out.
        finds_warmup: Whether to look for the warm-up in the run, which then lasts a little longer.
        timeout_s: When to give the run up; infinite for never.
    """

    steps: int = 200
    warmup: int = MIN_WARMUP
    finds_warmup: bool = False
    timeout_s: float = math.inf


class OutOfTime(Exception):
    """A run took longer than there was time for.

    Attributes:
        last_lines: The end of what it wrote to stderr.
    """

    last_lines: tuple[str, ...] = ()


def measured_run(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
    """Runs a command until it has done the steps of the plan, and reads what it recorded.

    Args:
        side: What to run, and where.
        name: The run's name.
        folder: Where to put the run's folder, and what the command prints.
        plan: How long to run.

    Raises:
        TrainingFailed: If the command ends with an error.
        OutOfTime: If it does not end in time. Its process is gone then.
    """
    with _started(side, name, folder, plan) as run, _in_time([run]):
        run.process.wait(plan.timeout_s if math.isfinite(plan.timeout_s) else None)
        run.ended_ns = time.perf_counter_ns()
    return run.measured()


def measured_in_turns(
    sides: Sequence[Side], names: Sequence[str], folder: Path, plan: RunPlan, turn_s: float = TURN_S
) -> list[MeasuredRun]:
    """Likewise several commands, all at the same time: each runs for a moment while the others are stopped.

    Steps in which one was stopped are left out, and so is the time to its first step for which it was. The
    mean is to have every stall, and long steps hold a stop: of them it leaves out that time alone.

    Args:
        sides: What to run, the first one first.
        names: Of the runs.
        folder: As of `measured_run`.
        plan: Likewise, for each; the time is that of all together.
        turn_s: How long each runs while the others wait.
    """
    with ExitStack() as stack:
        runs = [
            stack.enter_context(_started(side, name, folder, plan))
            for side, name in zip(sides, names, strict=True)
        ]
        with _in_time(runs):
            stops = take_turns([run.process for run in runs], turn_s, plan.timeout_s)
        ended_ns = time.perf_counter_ns()
    for run, of_run in zip(runs, stops, strict=True):
        run.stops, run.ended_ns = of_run, ended_ns
    return [run.measured() for run in runs]


@dataclass(slots=True, kw_only=True)
class _Run:
    """A run that goes on, or has ended.

    Attributes:
        started_ns: When its process began; likewise `ended_ns`.
        stops: When it was stopped, in turns with others.
    """

    side: Side
    name: str
    folder: Path
    plan: RunPlan
    process: subprocess.Popen[bytes]
    started_ns: int
    ended_ns: int = 0
    stops: Stops = ()

    @property
    def stderr(self) -> Path:
        return self.folder / f"{self.name}.stderr.txt"

    def measured(self) -> MeasuredRun:
        """Reads what it recorded.

        Raises:
            TrainingFailed: If it ended with an error.
        """
        run_folder, wall_s = self.folder / self.name, (self.ended_ns - self.started_ns) / NS_PER_S
        fate = _fate(read_manifest(run_folder), self.process.returncode)
        if fate != 0:
            raise failed(self.name, fate, self.stderr)
        if self.stops:
            keep_stops(run_folder, self.stops)
        logs, notes = read_logs(run_folder)
        instructions = count_of(_counts_file(self.folder, self.name))
        measured = figures_of(
            logs,
            None if self.plan.finds_warmup else self.plan.warmup,
            self.started_ns + _own_startup_ns(run_folder),
            self.stops,
        )
        figures = dict(measured.figures)
        if figures:  # a run that never trained has nothing to be judged by
            with contextlib.suppress(OSError, ValueError):  # it has ended well, and the disk may be full
                figures[Metric.PEAK_MEMORY] = (
                    int(_peak_file(self.folder, self.name).read_text()) * MAXRSS_UNIT
                )
            if instructions is not None:
                figures[Metric.INSTRUCTIONS] = instructions
        machine = machine_state(logs, measured.warmup)
        return MeasuredRun(
            name=self.name,
            folder=run_folder,
            root=self.side.root,
            figures=figures,
            num_steps=measured.num_steps,
            warmup=measured.warmup,
            step_s=measured.step_s,
            startup_s=figures.get(Metric.STARTUP, wall_s),
            wall_s=wall_s,
            # Who ran while it was stopped did not disturb it.
            machine=replace(machine, foreign_cpus=None) if self.stops else machine,
            device=next((str(log.meta.get("device") or "cpu") for log in logs), "cpu"),
            ranks=measured.job.ranks if measured.job else (),
            missing_ranks=measured.job.missing if measured.job else (),
            notes=(*notes, *filter(None, [measured.job.note if measured.job else ""])),
        )


def _command(side: Side, name: str, folder: Path, plan: RunPlan) -> list[str]:
    interpreter, command = split(side.command)
    # Another environment has a diagnose of its own: beside ours lie packages that are not for it.
    package = str(Path(diagnose.__file__).parents[1]) if interpreter == sys.executable else ""
    options = ["--quiet", "--run-dir", str(folder), "--name", name]
    warmup = MIN_WARMUP if plan.finds_warmup else plan.warmup
    options += ["--stop-after", str(warmup + plan.steps), "--warmup", str(warmup)]
    start = START.format(package=package, peak=str(_peak_file(folder, name).absolute()))
    return [interpreter, "-c", start, "run", *options, *command]


def _counts_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.perf"


def _peak_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.peak.txt"


@contextlib.contextmanager
def _started(side: Side, name: str, folder: Path, plan: RunPlan) -> Iterator[_Run]:
    """Starts a run; it is over on leaving, and so is whatever it started."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("DIAGNOSE_") or key == f"DIAGNOSE_{KEPT_SETTING.upper()}"
    }
    environment |= {"DIAGNOSE_PROJECT": KEPT_SETTING, **side.environment}
    if os.path.realpath(environment.get("PWD", side.root)) != os.path.realpath(side.root):
        environment["PWD"] = str(side.root)  # a script may go by it: Hydra's `${oc.env:PWD}`
    started_ns = time.perf_counter_ns()
    with (
        open(folder / f"{name}.stdout.txt", "wb") as stdout,
        open(folder / f"{name}.stderr.txt", "wb") as stderr,
        subprocess.Popen(
            [*counting(_counts_file(folder, name)), *_command(side, name, folder, plan)],
            cwd=side.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield _Run(
                side=side, name=name, folder=folder, plan=plan, process=process, started_ns=started_ns
            )
        finally:
            if process.returncode is None:
                _end(process)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind would disturb the next run


@contextlib.contextmanager
def _in_time(runs: Sequence[_Run]) -> Iterator[None]:
    """Says what the first run that has not ended wrote last, where there is no time left for it."""
    try:
        yield
    except subprocess.TimeoutExpired as late:
        out_of_time = OutOfTime()
        late_one = next((run for run in runs if run.process.returncode is None), runs[0])
        _end(late_one.process)
        out_of_time.last_lines = last_lines(late_one.stderr)
        raise out_of_time from late


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run, and the ranks of a job: torchrun starts each in a group of its own."""
    groups: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        groups |= _groups_below(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
            break
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _groups_below(pid: int) -> set[int]:
    """Returns the groups of the processes that descend from one, as far as `/proc` tells."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent, group = map(int, path.read_text(errors="replace").rpartition(")")[2].split()[1:3])
            children.setdefault(parent, []).append((int(path.parent.name), group))
    groups: set[int] = set()
    line = [pid]
    for each in line:  # it grows
        for child, group in children.get(each, ()):
            groups.add(group)
            line.append(child)
    return groups


def _fate(manifest: Mapping[str, Any], code: int) -> int | None:
    """Returns how the training ended, as of `subprocess`; `None` where nothing says so.

    The exit code of the command does not tell: `perf stat` ends with 0 where a signal killed what it ran.
    """
    if manifest.get("signal") is not None:
        return -int(manifest["signal"])
    if manifest.get("exit_code") is not None:
        return int(manifest["exit_code"])
    return code or None


def _own_startup_ns(folder: Path) -> int:
    """Time between the start of our process and that of the script's."""
    return round(float(read_manifest(folder).get("startup_s") or 0.0) * NS_PER_S)
