"""Pages of a run that goes on, opened in a real browser: what `dashboard.py` prints of them."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dashboard_feed import STEP_MS
from diagnose.dashboards._server import DashboardApp, create_app, server_of
from playwright.sync_api import Page, sync_playwright

from diagnose.launch.opened import listening_on

FEED = Path(__file__).with_name("dashboard_feed.py")
CHROMIUM = "/usr/bin/chromium"
CALLBACK = "/_dash-update-component"
RUN = "run"

CHART, ROW = ".js-plotly-plot .main-svg", "table.runs tbody tr"
"""What has to be on the screen for a page to be of use."""

PAINT_MS = 120_000
TOGETHER_S = 0.5
"""A page asks for several things at once, once a second: calls so near to each other are one tick."""

AFTER_PAINT_S = 1.5
"""What a page asks for when it is opened is no tick."""

HISTORY_S = 30
"""So long the history of a huge run is waited for; the table says how much of it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A page to open.

    Attributes:
        name: What the table calls it.
        address: Where it is.
        useful: What it shows once it is of use.
    """

    name: str
    address: str
    useful: str = CHART


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a callback: when it began, seconds in the server, bytes sent."""

    begun_s: float
    took_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A dashboard that serves in this process.

    Attributes:
        calls: Every call so far.
    """

    app: DashboardApp
    address: str
    calls: list[Call]

    @property
    def read_share(self) -> float:
        """How much of the run has been read."""
        return self.app.source.run(RUN).snapshot().filled_share

    @property
    def num_steps(self) -> int:
        """Steps that it is known to have."""
        return self.app.source.run(RUN).snapshot().num_steps


def views_of(steps: int, ranks: int) -> tuple[View, ...]:
    """Returns the pages that are opened of a run."""
    views = [View(name="run", address=f"/run/{RUN}")]
    if ranks > 1:
        views.append(View(name="ranks", address=f"/run/{RUN}/ranks"))
    if ranks > 1 and steps > 100_000:
        part = f"from={steps // 2}&to={steps // 2 + 1000}"
        views.append(View(name="1,000 of its steps", address=f"/run/{RUN}?{part}"))
    return tuple(views)


def measured(
    steps: int, ranks: int, views: Sequence[View], seconds: float, others: int = 0
) -> list[dict[str, Any]]:
    """Opens pages one after the other, each in a browser that knows nothing yet; returns a row for each.

    The server has just been started when the first is opened. Where the history is still being read then,
    that page has two rows.
    """
    rows: list[Figures] = []
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(feed(root / RUN, steps, ranks, others))
        site = stack.enter_context(served(root))
        for number, view in enumerate(views):
            rows += opened(view, site, seconds, is_first=number == 0)
    return [asdict(row) for row in rows]


def opened(view: View, site: Site, seconds: float, *, is_first: bool) -> list[Figures]:
    """Opens one page, and leaves it open."""
    of_run = view.useful == CHART
    rows = []
    with browser_page() as page:
        begun = time.perf_counter()
        page.goto(site.address + view.address)
        page.locator(view.useful).first.wait_for(timeout=PAINT_MS)
        painted_s: float | None = time.perf_counter() - begun
        page.wait_for_timeout(AFTER_PAINT_S * 1000)
        if is_first and of_run and site.read_share < 1:
            rows.append(left_open(page, f"{view.name}, at first", painted_s, site, seconds, of_run=True))
            painted_s = None
            end = time.monotonic() + HISTORY_S
            while site.read_share < 1 and time.monotonic() < end:
                page.wait_for_timeout(500)
        rows.append(left_open(page, view.name, painted_s, site, seconds, of_run=of_run))
    print(rows[-1], file=sys.stderr)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A row of the table.

    Attributes:
        page: Its name.
        painted_s: From the navigation to the first thing of use; `None` if it had been open before.
        ticks: How often it asked.
        callback_ms: The slowest callback of a tick, by the server's time in it: the median over the ticks.
        most_ms: Likewise of the slowest tick.
        kilobytes: Sent in a tick, all callbacks together, uncompressed: the median.
        most_kilobytes: Likewise of the tick with most.
        read_share: How much of the run's history had been read in the end.
        fed_share: How much of what the job should have written meanwhile it has.
    """

    page: str
    painted_s: float | None
    ticks: int
    callback_ms: float | None
    most_ms: float | None
    kilobytes: float | None
    most_kilobytes: float | None
    read_share: float
    fed_share: float


def left_open(
    page: Page, name: str, painted_s: float | None, site: Site, seconds: float, *, of_run: bool
) -> Figures:
    """Looks for so many seconds what an open page asks for."""
    first, begun = len(site.calls), time.monotonic()
    steps = site.num_steps if of_run else 0
    page.wait_for_timeout(seconds * 1000)
    expected = (time.monotonic() - begun) * 1000 / STEP_MS
    ticks: list[list[Call]] = []
    for call in sorted(site.calls[first:], key=lambda call: call.begun_s):
        if not ticks or call.begun_s - ticks[-1][0].begun_s > TOGETHER_S:
            ticks.append([])
        ticks[-1].append(call)
    times_ms = [1000 * max(call.took_s for call in tick) for tick in ticks]
    kilobytes = [sum(call.num_bytes for call in tick) / 1000 for tick in ticks]
    return Figures(
        page=name,
        painted_s=painted_s,
        ticks=len(ticks),
        callback_ms=statistics.median(times_ms) if ticks else None,
        most_ms=max(times_ms, default=None),
        kilobytes=statistics.median(kilobytes) if ticks else None,
        most_kilobytes=max(kilobytes, default=None),
        read_share=site.read_share if of_run else 1.0,
        fed_share=(site.num_steps - steps) / expected if of_run else 1.0,
    )


@contextlib.contextmanager
def feed(folder: Path, steps: int, ranks: int, others: int) -> Iterator[None]:
    """Keeps a run growing."""
    command = [sys.executable, str(FEED), str(folder), str(steps), str(ranks), "--others", str(others)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit("the feed has failed")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def served(root: Path) -> Iterator[Site]:
    """Serves the runs in a folder."""
    app = create_app(root)
    calls: list[Call] = []
    serve = app.server.wsgi_app

    def timed(environ: dict[str, Any], start_response: Any) -> Any:
        begun = time.perf_counter()
        answer = list(serve(environ, start_response))
        if environ["PATH_INFO"] == CALLBACK:
            took_s = time.perf_counter() - begun
            calls.append(Call(begun_s=begun, took_s=took_s, num_bytes=sum(map(len, answer))))
        return answer

    app.server.wsgi_app = timed  # type: ignore[method-assign]
    listening = listening_on("127.0.0.1", 0)
    server = server_of(app, listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Site(app=app, address=f"http://127.0.0.1:{listening.getsockname()[1]}", calls=calls)
    finally:
        server.shutdown()
        server.server_close()
        app.source.close()


@contextlib.contextmanager
def browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser.new_page()
        finally:
            browser.close()
