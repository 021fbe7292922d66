"""Every page, and a run in every state, on a telephone in the dark; and which pages ask for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from diagnose.report import to_html
from tests.browsing import barriers, fits, go, launched, name_of, needs_browser, new_tab, shoot
from tests.mixing import mostly_extended
from tests.recorded import manifest, record
from tests.running import REPOSITORY, comes_true
from tests.test_report_html import TUNED

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import dashboard_feed
from dashboard_pages import Site, served

pytestmark = needs_browser
PHONE = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
STATES = {
    "/": "newest first",
    "/run/none": "No optimizer step was seen",
    "/run/one": "1 step",
    "/run/damaged": "cannot be read",
    "/run/gone": "no end seen",
    "/run/huge": "Rank 5 waits for its data",
    "/run/huge/before-after": "fix-number-0",
    "/run/huge/input": "No DataLoader was seen",
    "/run/huge/kernels": "No deep window was taken",
    "/run/huge/ranks": "rank 5",
    "/gate-history": "against the 401 before",
    "/compare?a=gone&b=huge": "Metric by metric",
}
PAUSE_S = 2.2
"""Two ticks would have come."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("states") / ".diagnose" / "runs"
    dashboard_feed.begin(root / "huge", 4_000, 64)
    told = json.loads((root / "huge" / "run.json").read_text())
    (root / "huge" / "run.json").write_text(json.dumps({**told, "ended_unix": time.time(), "exit_code": 0}))
    dashboard_feed.begin(root / "live", 500, 1)  # by this process, which goes on
    manifest(root / "none", exit_code=3)
    record(manifest(root / "one"), 1)
    (manifest(root / "damaged") / "rank0.sqlite").write_bytes(b"no database" * 100)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed = {"ended_unix": None, "exit_code": None, "host": os.uname().nodename, "pid": ended.pid}
    record(manifest(root / "gone", **killed), 300, host=killed["host"], pid=ended.pid)
    baselines = root.parent / "baselines"
    baselines.mkdir()
    (baselines / "machine.json").write_text(history(*[400.0] * 12, *[360.0] * 8))
    with served(root) as site:
        yield site


def history(*rates: float) -> str:
    """The gate's baseline file of a machine on which the commits came to these samples/s."""
    entries = [
        {
            "when": f"2026-11-{day:02}T10:00:00+00:00",
            "commit": f"{day:02}" * 20,
            "branch": "main",
            "metrics": {"samples_per_s": rate + day % 3},
            "runs": [{"samples_per_s": rate}],
        }
        for day, rate in enumerate(rates, start=1)
    ]
    return json.dumps(
        {"schema": 1, "fingerprint": {"hard": {"command": "train.py", "cpus": 2.0}}, "entries": entries}
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(site: Site, browser: Browser) -> Iterator[tuple[Page, list[str]]]:
    problems: list[str] = []
    with new_tab(browser, problems, site.address, **PHONE) as opened:
        opened.goto(f"{site.address}/")
        yield opened, problems


@pytest.fixture
def page(tab: tuple[Page, list[str]]) -> Iterator[Page]:
    """The tab; the test fails if the browser complained, or asked anybody else for anything."""
    opened, problems = tab
    problems.clear()
    yield opened
    assert problems == []


@pytest.mark.parametrize(
    "address, words",
    mostly_extended(
        {name_of(address): (address, words) for address, words in STATES.items()},
        *map(name_of, ("/run/none", "/run/damaged", "/run/huge", "/run/huge/ranks", "/gate-history")),
    ),
)
def test_every_state_is_drawn_without_barriers_on_a_phone_in_the_dark(
    page: Page, address: str, words: str
) -> None:
    go(page, address)
    expect(page.locator("#page")).to_contain_text(words)
    assert page.evaluate("document.documentElement.dataset.mantineColorScheme") == "dark"
    assert barriers(page) == []
    assert fits(page)
    shoot(page, f"state-{name_of(address)}-390-dark")


def calls_within(site: Site, page: Page, seconds: float) -> int:
    before = len(site.calls)
    page.wait_for_timeout(1000 * seconds)
    return len(site.calls) - before


@pytest.mark.extended
def test_the_page_of_a_run_that_is_over_asks_for_nothing_any_more(site: Site, page: Page) -> None:
    go(page, "/run/one")
    expect(page.locator("#page")).to_contain_text("1 step")
    assert comes_true(lambda: calls_within(site, page, PAUSE_S) == 0)


@pytest.mark.extended
def test_a_tab_that_nobody_sees_asks_for_nothing_until_it_is_seen_again(site: Site, page: Page) -> None:
    go(page, "/run/live")
    expect(page.locator(".badge.live")).to_contain_text("running")
    assert comes_true(lambda: calls_within(site, page, 0.3) > 0)
    see = """hidden => {
        Object.defineProperty(document, 'hidden', {get: () => hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(see, True)
    assert comes_true(lambda: calls_within(site, page, PAUSE_S) == 0)
    page.evaluate(see, False)
    assert comes_true(lambda: calls_within(site, page, 0.3) > 0)


@pytest.mark.parametrize(
    "interactive", mostly_extended({"drawn": False, "interactive": True}, "interactive")
)
def test_a_report_opens_from_its_file_alone(browser: Browser, tmp_path: Path, interactive: bool) -> None:
    path = tmp_path / "report.html"
    path.write_text(to_html(TUNED, interactive=interactive), encoding="utf-8")
    problems: list[str] = []
    with new_tab(browser, problems, path.as_uri(), offline=True, **PHONE) as page:
        page.goto(path.as_uri())
        drawn = page.locator(".main-svg" if interactive else "svg[role=img]")
        expect(drawn.first).to_be_visible()
        expect(page.locator("body")).to_contain_text("1.5x (1.2 to 1.8)")
        assert barriers(page) == []
        assert fits(page)
        shoot(page, f"report-{'interactive' if interactive else 'drawn'}-390-dark")
    assert problems == [], "it asked for nothing, and its policy forbade nothing that it does"
