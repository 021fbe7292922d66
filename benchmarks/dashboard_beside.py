"""What an open page costs the job that it shows: what `dashboard.py` prints of it.

One training loop runs under `diagnose run --dashboard`. Its page is asked for once a second, as an open
browser does, by a client that draws nothing. The dashboard's processes are let go on and stopped in turn,
a second each, in the order on, off, off, on or the other way round: what drifts slowly is on both sides.
Every instant counts, spikes too, as what the dashboard does comes in spikes: a few milliseconds a second.

The machine's own noise, of hosts and neighbours, is in the time of a step. What a page can take from the
job are CPUs above all, so it is also counted how long the job's threads were ready to run and had none.

Two arms take turns: job and dashboard pinned apart, on CPUs of their own, and both where the system likes.
Asking the rules is another thing, done seldom: its seconds are told apart, and stretches in which they are
asked left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from dashboard_pages import CALLBACK, CHART, PAINT_MS, browser_page
from playwright.sync_api import Request

from diagnose.analysis.steps import step_times
from diagnose.core.ledger import COLUMNS
from diagnose.gate.statistics import hodges_lehmann, interval_95
from diagnose.store.reader import read_rank
from diagnose.store.tail import look

JOB = Path(__file__).with_name("overhead_job.py")
STEP_MS = 10
ARMS = ("apart", "free")
CPUS = sorted(os.sched_getaffinity(0))
STRETCH_S = 1.0
"""One tick of a page lies in each stretch with the dashboard."""

ASKS_AFTER_S = 0.3
"""So long after the dashboard was let go on it has seen the newest steps, which the page is then sent."""

ORDERS = ((True, False, False, True), (False, True, True, False))
ANALYSED_S = 0.05
"""Of CPU time in the analyst's process within four stretches: less is its sleep."""

QUIET_S = 3.0
FIRST_ANALYSIS_S = 60.0


@dataclass(slots=True)
class Turn:
    """Four stretches.

    Attributes:
        arm: Where the processes might run.
        stretches: When each began and ended, by the clock of the steps, and whether the dashboard went on.
        analyst_s: CPU time of the analyst in them.
        dashboard_s: Of the dashboard's other process.
        waited_s: What the job's threads waited for a CPU, all together, with the dashboard and without.
    """

    arm: str
    stretches: list[tuple[float, float, bool]] = field(default_factory=list)
    analyst_s: float = 0.0
    dashboard_s: float = 0.0
    waited_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def waits(self) -> float:
        """Returns what the job's threads waited longer with the dashboard, as a part of the time."""
        return (self.waited_s[True] - self.waited_s[False]) / (len(self.stretches) / 2 * STRETCH_S)

    def log_ratio(self, ends_s: npt.NDArray[np.float64]) -> float:
        """Returns how much longer a step took with the dashboard, as a logarithm."""
        done = np.arange(len(ends_s))
        per_step = {}
        for on in (True, False):
            parts = [part for part in self.stretches if part[2] is on]
            steps = sum(float(np.diff(np.interp(part[:2], ends_s, done))[0]) for part in parts)
            per_step[on] = sum(end - begin for begin, end, _ in parts) / steps
        return math.log(per_step[True] / per_step[False])


def measured(turns: int) -> dict[str, Any]:
    """Lets a job train with its page open and not, so many turns of four stretches for each arm."""
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable,
            "-m",
            "diagnose",
            "run",
            "--dashboard",
            "--name",
            "job",
            "--run-dir",
            root,
        ]
        job = [
            str(JOB),
            "--step-ms",
            str(STEP_MS),
            "--steps",
            "10000000",
            "--out",
            os.path.join(root, "out"),
        ]
        process = subprocess.Popen([*command, *job], stderr=subprocess.DEVNULL)
        folder = Path(root) / "job"
        try:
            begun = time.monotonic()
            taken, first_s, analysed_s = turned(folder, turns)
            lasted_s = time.monotonic() - begun
        finally:
            os.sched_setaffinity(0, CPUS)
            process.send_signal(signal.SIGTERM)
            process.wait()
        log = read_rank(folder / "rank0.sqlite")
    ends_s = log.steps[:, COLUMNS.index("end_ns")] / 1e9
    told: dict[str, Any] = {
        "step_ms": statistics.median(step_times(log.steps).tolist()) / 1e6,
        "first_analysis_s": first_s,
        "analyses_share": analysed_s / lasted_s,
    }
    for arm in ARMS:
        own = [turn for turn in taken if turn.arm == arm]
        calm = [turn for turn in own if turn.analyst_s < ANALYSED_S]
        ratios = [turn.log_ratio(ends_s) for turn in calm]
        low, high = interval_95(ratios)
        waits = [turn.waits() for turn in calm]
        waits_low, waits_high = interval_95(waits)
        told[arm] = {
            "turns": len(calm),
            "left_out": len(own) - len(calm),
            "longer": math.expm1(hodges_lehmann(ratios)),
            "low": math.expm1(low),
            "high": math.expm1(high),
            "waits": hodges_lehmann(waits),
            "waits_low": waits_low,
            "waits_high": waits_high,
            "cpu_share": sum(turn.dashboard_s for turn in calm) / (2 * STRETCH_S * len(calm)),
        }
    return told


def turned(folder: Path, turns: int) -> tuple[list[Turn], float, float]:
    """Lets the dashboard go on and stops it; returns the turns, and the analyst's CPU time: for the first
    analysis, and for all."""
    url = folder / "dashboard.url"
    while not url.exists() or not (folder / "rank0.sqlite").exists():
        time.sleep(0.1)
    asked = requests_of(url.read_text().strip())
    leader = dashboard_of(folder)
    trains = trainer_of(folder)
    first_s = analysed(leader)
    taken = []
    for number in range(turns * len(ARMS)):
        arm = ARMS[number % len(ARMS)]
        place(arm, trains, leader)
        turn = Turn(arm=arm)
        before_s = analyst_s(leader), cpu_s([leader])
        for on in ORDERS[number // len(ARMS) % len(ORDERS)]:
            os.killpg(leader, signal.SIGCONT if on else signal.SIGSTOP)
            begun, waited_s = time.perf_counter(), delay_s(trains)
            if on:
                time.sleep(ASKS_AFTER_S)
                for address, body in asked:
                    ask(address, body)
            time.sleep(max(0.0, begun + STRETCH_S - time.perf_counter()))
            turn.stretches.append((begun, time.perf_counter(), on))
            turn.waited_s[on] += delay_s(trains) - waited_s
        turn.analyst_s = analyst_s(leader) - before_s[0]
        turn.dashboard_s = cpu_s([leader]) - before_s[1]
        taken.append(turn)
    os.killpg(leader, signal.SIGCONT)
    return taken, first_s, analyst_s(leader)


def analysed(leader: int) -> float:
    """Waits until the rules have been asked for the first time; returns the CPU time that it took."""
    end, known_s, since = time.monotonic() + FIRST_ANALYSIS_S, 0.0, time.monotonic()
    while time.monotonic() < end and (not known_s or time.monotonic() - since < QUIET_S):
        now_s = analyst_s(leader)
        if now_s - known_s > 0.01:
            known_s, since = now_s, time.monotonic()
        time.sleep(0.2)
    return known_s


def place(arm: str, trains: int, leader: int) -> None:
    """Pins the job and the dashboard apart, or neither. This process, the client, goes with the latter."""
    half = max(1, len(CPUS) // 2)
    own, others = (CPUS[:half], CPUS[half:] or CPUS) if arm == "apart" else (CPUS, CPUS)
    for pid, where in [(trains, own), *((pid, others) for pid in (os.getpid(), *group_of(leader)))]:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), where)


def trainer_of(folder: Path) -> int:
    """Returns the process that trains."""
    with look(folder / "rank0.sqlite") as file:
        return int(file.meta()["pid"])


def dashboard_of(folder: Path) -> int:
    """Returns the dashboard's process; it leads a group, its analyst included."""
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = status.read_bytes().split(b"\0")
            if b"--socket-fd" in words and str(folder.parent).encode() in words:
                return os.getpgid(int(status.parent.name))
    raise SystemExit("the dashboard is not running")


def group_of(leader: int) -> Iterator[int]:
    """Returns the processes of a group."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[2]) == leader:
                yield int(status.parent.name)


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU time of some processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def delay_s(pid: int) -> float:
    """Returns how long the threads of a process were ready to run and had no CPU, all together."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total_ns += int(thread.read_text().split()[1])
    return total_ns / 1e9


def analyst_s(leader: int) -> float:
    """Returns the CPU time of the processes in which the dashboard asks the rules."""
    return cpu_s(pid for pid in group_of(leader) if pid != leader)


def requests_of(address: str) -> list[tuple[str, bytes]]:
    """Returns what an open page asks for each second."""
    found: dict[str, tuple[str, bytes]] = {}

    def see(request: Request) -> None:
        body = request.post_data_buffer
        if CALLBACK in request.url and body is not None and b"tick.n_intervals" in body:
            output = re.search(rb'"output":\s*"([^"]*)"', body)
            found[output[1].decode() if output else ""] = (request.url, body)

    with browser_page() as page:
        page.on("request", see)
        page.goto(address)
        page.wait_for_selector(CHART, timeout=PAINT_MS)
        page.wait_for_timeout(5000)
    if not found:
        raise SystemExit("the page asked for nothing in five seconds")
    return list(found.values())


def ask(address: str, body: bytes) -> None:
    # The page's own memory of what it has drawn is of one moment: every answer is sent in full.
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()
