"""What the dashboard costs: its reader, in time and bytes, and the job that trains beside it.

    python benchmarks/dashboard.py [--seconds 20] [--pairs 10] [--markdown docs/dashboard-cost.md]

Pages: a run that goes on is opened in a real browser. First useful paint is the time from the navigation to
the first chart on the screen, with a server that has just been started and an empty cache. Then the page
is left open: of each second the slowest callback counts, by the server's time in it, and the bytes of all.

The job: one training loop runs under `diagnose run --dashboard`; its page is asked for once a second, as an
open browser does, by a client that draws nothing. Every few seconds the dashboard's processes are stopped
or let go on. Step times of neighbouring stretches with and without are compared in pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from diagnose.dashboards._server import create_app, server_of
from playwright.sync_api import Page, Request, sync_playwright

from diagnose.analysis.steps import step_times
from diagnose.core.ledger import COLUMNS
from diagnose.launch.opened import listening_on
from diagnose.store.reader import read_rank

FEED = Path(__file__).with_name("dashboard_feed.py")
JOB = Path(__file__).with_name("overhead_job.py")
CHROMIUM = "/usr/bin/chromium"
CALLBACK = "/_dash-update-component"
SHAPES = ((10_000, 1), (100_000, 1), (1_000_000, 1), (10_000, 64))
"""Steps and ranks of the runs that are opened."""

STRETCH_S = 8.0
"""With the dashboard, and then as long without; the first second of each is left out."""

LEFT_OUT_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=20, help="how long each page is left open")
    parser.add_argument("--pairs", type=int, default=10, help="stretches with and without; 0 for none")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    lines = [
        f"Measured on {date.today()}: {platform.machine()}, {os.cpu_count()} CPUs, Python"
        f" {platform.python_version()}, load average {os.getloadavg()[0]:.1f} at the start;"
        f" {args.seconds} s per page. Printed by `benchmarks/dashboard.py`.",
        "",
        "| steps | ranks | page | first paint (s) | slowest callback (ms) | p95 (ms) | KB a tick | most |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for steps, ranks in SHAPES:
        with tempfile.TemporaryDirectory() as root, feed(Path(root) / "run", steps, ranks):
            for page in ("", "/ranks") if ranks > 1 else ("",):
                lines.append(opened(Path(root), f"/run/run{page}", steps, ranks, args.seconds))
                print(lines[-1], file=sys.stderr)
    if args.pairs:
        lines += ["", beside_a_job(args.pairs)]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def feed(folder: Path, steps: int, ranks: int) -> Iterator[None]:
    """Keeps a run growing."""
    command = [sys.executable, str(FEED), str(folder), str(steps), str(ranks)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def opened(root: Path, path: str, steps: int, ranks: int, seconds: int) -> str:
    """Opens a page in a browser and leaves it open; returns the row of the table."""
    app = create_app(root)
    calls: list[tuple[float, float, int]] = []  # when, seconds, bytes
    serve = app.server.wsgi_app

    def timed(environ: dict[str, Any], start_response: Any) -> Any:
        begun = time.perf_counter()
        answer = list(serve(environ, start_response))
        if environ["PATH_INFO"] == CALLBACK:
            calls.append((begun, time.perf_counter() - begun, sum(map(len, answer))))
        return answer

    app.server.wsgi_app = timed  # type: ignore[method-assign]
    listening = listening_on("127.0.0.1", 0)
    server = server_of(app, listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}{path}"
    try:
        with browser_page() as page:
            begun = time.perf_counter()
            page.goto(address)
            page.wait_for_selector(".js-plotly-plot .main-svg", timeout=120_000)
            painted_s = time.perf_counter() - begun
            page.wait_for_timeout(3000)  # history fills in, and the rules answer
            first = len(calls)
            page.wait_for_timeout(seconds * 1000)
    finally:
        server.shutdown()
        server.server_close()
        app.source.close()
    ticks = calls[first:]
    slowest: dict[int, float] = {}
    sent: dict[int, int] = {}
    for when, took_s, num_bytes in ticks:
        second = int(when)
        slowest[second] = max(slowest.get(second, 0.0), took_s * 1000)
        sent[second] = sent.get(second, 0) + num_bytes
    times_ms = sorted(slowest.values())
    page_name = path.removeprefix("/run/run").lstrip("/") or "run"
    kilobytes = [num_bytes / 1000 for num_bytes in sent.values()]
    late_ms = times_ms[math.ceil(0.95 * len(times_ms)) - 1]
    return (
        f"| {steps:,} | {ranks} | {page_name} | {painted_s:.1f} | {statistics.median(times_ms):.1f} |"
        f" {late_ms:.1f} | {statistics.median(kilobytes):.0f} | {max(kilobytes):.0f} |"
    )


@contextlib.contextmanager
def browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser.new_page()
        finally:
            browser.close()


def beside_a_job(pairs: int) -> str:
    """Returns, in a sentence, how much longer steps are while the dashboard is open."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "diagnose", "run", "--dashboard"]
        command += ["--name", "job", "--run-dir", root]
        job = [str(JOB), "--step-ms", "10", "--steps", "10000000", "--out", os.path.join(root, "out")]
        process = subprocess.Popen([*command, *job], stderr=subprocess.DEVNULL)
        folder = Path(root) / "job"
        try:
            times, cpus = stretches(folder, pairs)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        log = read_rank(folder / "rank0.sqlite")
    ended_s = log.steps[:, COLUMNS.index("end_ns")] / 1e9
    each_ms = step_times(log.steps) / 1e6

    def mean_ms(begun: float) -> float:
        part = each_ms[(ended_s > begun + LEFT_OUT_S) & (ended_s < begun + STRETCH_S)]
        usual = np.sort(part)[: math.ceil(0.9 * len(part))]  # without the spikes of other programs
        return float(np.mean(usual))

    ratios = [math.log(mean_ms(with_it) / mean_ms(without)) for with_it, without in times]
    typical, low, high = interval(ratios)
    return (
        f"The job beside it: steps of {statistics.median(each_ms):.1f} ms took {typical:+.1%} longer with a"
        f" page open ({low:+.1%} to {high:+.1%}, 95 % over {pairs} pairs of {STRETCH_S:.0f} s each)."
        f" The dashboard's processes used {cpus:.1%} of one CPU meanwhile, the first analysis included."
    )


def stretches(folder: Path, pairs: int) -> tuple[list[tuple[float, float]], float]:
    """Lets the dashboard go on and stops it in turn.

    Returns:
        When each pair of stretches began, with and without, by `time.perf_counter`, which is also the clock
        of the steps; and the CPUs that the dashboard used while it was let go on.
    """
    url = folder / "dashboard.url"
    while not url.exists() or not (folder / "rank0.sqlite").exists():
        time.sleep(0.1)
    asked = requests_of(url.read_text().strip())
    group = dashboard_group(folder)
    begun: list[tuple[float, float]] = []
    before_s = cpu_s(group)
    for number in range(pairs):
        own: dict[bool, float] = {}
        for on in (True, False) if number % 2 else (False, True):
            os.killpg(group, signal.SIGCONT if on else signal.SIGSTOP)
            own[on] = time.perf_counter()
            while (left := own[on] + STRETCH_S - time.perf_counter()) > 0:
                if on:
                    for address, body in asked:
                        ask(address, body)
                time.sleep(min(1.0, left))
        begun.append((own[True], own[False]))
        print(f"pair {number + 1} of {pairs}", file=sys.stderr)
    os.killpg(group, signal.SIGCONT)
    return begun, (cpu_s(group) - before_s) / (pairs * STRETCH_S)


def cpu_s(group: int) -> float:
    """Returns the CPU time of the processes of a group."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


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
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=120_000)
        page.wait_for_timeout(5000)
    if not found:
        raise SystemExit("the page asked for nothing in five seconds")
    return list(found.values())


def ask(address: str, body: bytes) -> None:
    # The page's own memory of what it has drawn is of one moment: every answer is sent in full.
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def dashboard_group(folder: Path) -> int:
    """Returns the process group of the run's dashboard, its analyst included."""
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = status.read_bytes().split(b"\0")
            if b"--socket-fd" in words and str(folder.parent).encode() in words:
                return os.getpgid(int(status.parent.name))
    raise SystemExit("the dashboard is not running")


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Returns the median of logarithms of ratios, and the interval of 95 % from its sign test."""
    ordered = sorted(ratios)
    count = len(ordered)
    outside = 0
    chance = 2 * 0.5**count
    while outside < count // 2 - 1 and chance + 2 * math.comb(count, outside + 1) * 0.5**count < 0.05:
        outside += 1
        chance += 2 * math.comb(count, outside) * 0.5**count
    low, high = ordered[outside], ordered[count - 1 - outside]
    return math.expm1(statistics.median(ordered)), math.expm1(low), math.expm1(high)


if __name__ == "__main__":
    main()
