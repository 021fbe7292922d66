"""A real browser for the tests: what it complains of, what keeps people out, and how a page is moved."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import numpy.typing as npt
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.running import REPOSITORY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="NO BROWSER: the dashboard's pages are NOT tested here; install chromium, or make test as root",
)
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SHOTS = Path(os.environ.get("DIAGNOSE_SCREENSHOTS") or REPOSITORY / "build" / "screenshots")
"""Where each test leaves what it saw, for people to look at."""

SERIOUS = ("serious", "critical")
SLOW_MS = 30_000
CALLBACK = "/_dash-update-component"
WAITING = ".reading"
"""What stands on a page before anything is known."""

expect.set_options(timeout=SLOW_MS)


@contextmanager
def launched() -> Iterator[Browser]:
    """Starts the browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGS))
        yield browser
        browser.close()


@contextmanager
def new_tab(browser: Browser, problems: list[str], home: str, **options: Any) -> Iterator[Page]:
    """Opens a tab.

    Args:
        problems: Gets what the browser complains of, and every request that leaves the address.
        home: That address.
        options: Of the tab, as playwright has them.
    """
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(SLOW_MS)
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on("request", lambda request: _stays(request.url, home, problems))
    yield page
    context.close()


def _stays(url: str, home: str, problems: list[str]) -> None:
    if urlparse(url).scheme not in ("data", "blob", "about") and not url.startswith(home):
        problems.append(f"request to {url}")


def go(page: Page, address: str) -> None:
    """Goes to an address of the site as a click on a link does, without loading everything again."""
    page.evaluate(
        "to => { history.pushState({}, '', to); dispatchEvent(new Event('_dashprivate_pushstate')); }",
        address,
    )


def shoot(page: Page, name: str) -> None:
    """Leaves a picture."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


def barriers(page: Page) -> list[str]:
    """What keeps people with a screen reader, a keyboard or weak eyes out, as far as axe can see it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for each in found
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]


DRAWN = """() => {
    const read = name => document.querySelector(`#run-${name} .js-plotly-plot`);
    const line = read("throughput"), areas = read("ledger");
    return {
        marks: line.layout.annotations.map(each => [each.x, each.text]),
        first: areas.data[0].x0,
        width: areas.data[0].dx,
        phases: areas._fullData.map(each => Array.from(each.y)),
        rate: Array.from(line._fullData[0].y),
    };
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What the charts of a run show at this moment.

    Attributes:
        kept_at: The step at which the first fix was kept, as it is marked; `None` without such a mark.
        step: The first step of each bin.
        step_ms: As high as all the areas on one another are there.
        rate: Throughput.
    """

    kept_at: float | None
    step: npt.NDArray[np.float64]
    step_ms: npt.NDArray[np.float64]
    rate: npt.NDArray[np.float64]


def drawn(page: Page) -> Drawn:
    """Reads the charts of the overview."""
    read = page.evaluate(DRAWN)
    step_ms = np.sum(read["phases"], axis=0)
    return Drawn(
        kept_at=next((at for at, text in read["marks"] if " kept" in text), None),
        step=read["first"] + read["width"] * np.arange(float(len(step_ms))),
        step_ms=step_ms,
        rate=np.array(read["rate"]),
    )


def fits(page: Page) -> bool:
    """Whether nothing sticks out at the side; the menu takes a moment to slide out."""
    for _ in range(100):
        if page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"):
            return True
        page.wait_for_timeout(50)
    return False


def name_of(address: str) -> str:
    """Returns a name for the picture of a page."""
    return re.sub(r"[^a-z]+", "-", address).strip("-") or "runs"
