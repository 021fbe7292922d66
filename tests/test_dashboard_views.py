"""Every view is an address: what is typed, picked, zoomed into with keys and mouse; and a server gone."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnose.dashboards._server import create_app, server_of
from playwright.sync_api import Browser, Page, TimeoutError, expect

from diagnose.launch.opened import listening_on
from tests.browsing import barriers, fits, go, launched, needs_browser, new_tab, shoot
from tests.recorded import manifest, record
from tests.running import environment

pytestmark = needs_browser
STEPS = 5000
CHART = "document.querySelector('#run-ledger .js-plotly-plot')"
SIZE = {"width": 1024, "height": 900}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views") / "runs"
    record(manifest(folder / "long", started_unix=2000.0), STEPS)
    for number in range(30):
        record(manifest(folder / f"short{number}", started_unix=float(number), exit_code=number % 2), 40)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as opened:
        yield opened


@pytest.fixture(scope="module")
def tab(root: Path, browser: Browser) -> Iterator[tuple[Page, list[str]]]:
    app = create_app(root)
    listening = listening_on("127.0.0.1", 0)
    server = server_of(app, listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{listening.getsockname()[1]}"
    problems: list[str] = []
    try:
        with new_tab(browser, problems, home, viewport=SIZE) as page:
            page.goto(home)
            yield page, problems
    finally:
        server.shutdown()
        server.server_close()
        app.source.close()


@pytest.fixture
def page(tab: tuple[Page, list[str]]) -> Iterator[Page]:
    opened, problems = tab
    problems.clear()
    opened.set_viewport_size(SIZE)
    yield opened
    assert problems == []


def drawn(page: Page, first: int, width: int) -> None:
    """Waits until the chart begins at a step, counted from 1, with bins of so many steps."""
    page.wait_for_function(
        f"([first, width]) => {{ const [area] = {CHART}?.data || [{{}}];"
        " return area?.x0 === first && area.dx === width; }",
        arg=[first, width],
    )


@pytest.mark.extended
def test_what_is_searched_and_picked_is_in_the_address(page: Page) -> None:
    go(page, "/")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(25)
    page.get_by_role("link", name="Older").click()
    expect(page).to_have_url(re.compile(r"/\?page=2$"))
    expect(rows).to_have_count(6)
    page.get_by_label("compare short3", exact=True).check()
    field = page.get_by_label("Search")
    field.press_sequentially("short2")
    expect(page).to_have_url(re.compile(r"\?pick=short3&search=short2$"))
    expect(field).to_be_focused()
    expect(rows).to_have_count(11)
    page.get_by_role("link", name="Not closed or failed").click()
    expect(rows).to_have_count(5)
    page.reload()
    expect(rows).to_have_count(5)
    expect(page.get_by_label("Search")).to_have_value("short2")
    expect(page.locator("#runs-compare")).to_contain_text("Pick one more than short3.")
    page.go_back()
    expect(rows).to_have_count(11)
    page.get_by_label("compare short20").check()
    expect(page.get_by_role("link", name="Compare the two")).to_have_attribute(
        "href", "/compare?a=short3&b=short20"
    )
    shoot(page, "runs-searched-1024-light")
    page.get_by_label("compare short21").check()
    expect(page.get_by_label("compare short20")).to_be_checked()
    page.get_by_label("Search").fill("")
    expect(page).to_have_url(re.compile(r"\?pick=short20%2Cshort21$"))


@pytest.mark.extended
def test_the_keyboard_zooms_to_single_steps_and_along(page: Page) -> None:
    go(page, "/run/long")
    drawn(page, 1, 16)
    page.get_by_label("From step").fill("1001")
    page.get_by_label("to step", exact=True).fill("1100")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/run/long\?from=1000&to=1100$"))
    drawn(page, 1001, 1)
    expect(page.get_by_label("to step", exact=True)).to_be_focused()
    later = page.get_by_role("link", name="Later")
    later.focus()
    before = later.element_handle()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"\?from=1050&to=1150$"))
    drawn(page, 1051, 1)
    page.wait_for_function("link => !link.isConnected", arg=before)
    expect(later).to_be_focused()  # the link that Dash has put in its place
    expect(page.get_by_label("From step")).to_have_value("1051")
    shoot(page, "run-zoomed-1024-light")
    page.get_by_role("link", name="Zoom out").click()
    expect(page).to_have_url(re.compile(r"\?from=1000&to=1200$"))
    page.go_back()
    drawn(page, 1051, 1)
    page.reload()
    drawn(page, 1051, 1)
    expect(page.get_by_label("to step", exact=True)).to_have_value("1150")
    page.get_by_role("link", name="All steps").click()
    drawn(page, 1, 16)
    expect(page.get_by_label("From step")).to_have_value("")
    assert barriers(page) == []


@pytest.mark.extended
def test_a_range_drawn_with_the_mouse_is_read_in_finer_bins(page: Page) -> None:
    go(page, "/run/long")
    drawn(page, 1, 16)
    plot = page.locator("#run-ledger .nsewdrag")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    above = page.evaluate("window.scrollY")
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.50, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.52, y, steps=4)
    page.mouse.move(box["x"] + box["width"] * 0.55, y, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"\?from=\d+&to=\d+$"))
    first, last = map(int, re.findall(r"\d+", page.url.partition("?")[2]))
    assert STEPS * 0.45 < first < last < STEPS * 0.6
    drawn(page, first + 1, 1)
    assert page.evaluate("window.scrollY") == above, "the page stays where it is"
    shown = page.evaluate(f"{CHART}._fullLayout.xaxis.range")
    assert first - 8 < shown[0] < shown[1] < last + 8, "the chart shows the range, and no more"
    for _ in range(5):  # two clicks that a busy page gets too far apart are no double click, to nobody
        plot.dblclick(position={"x": 50, "y": 50})
        with contextlib.suppress(TimeoutError):
            page.wait_for_url(re.compile(r"/run/long$"), timeout=5000)
            break
    expect(page).to_have_url(re.compile(r"/run/long$"))
    drawn(page, 1, 16)


@pytest.mark.extended
def test_what_leads_to_a_range_fits_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    go(page, "/run/long?from=1000&to=1100")
    drawn(page, 1001, 1)
    assert fits(page)
    go(page, "/?page=2&search=short")
    expect(page.locator("table.runs tbody tr")).to_have_count(5)
    assert fits(page)


@pytest.mark.extended
def test_an_open_page_says_that_its_server_is_gone_and_goes_on_with_the_next(
    root: Path, browser: Browser
) -> None:
    with listening_on("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "diagnose", "dashboard", "--run-dir", str(root), "--no-open"]
    problems: list[str] = []
    home = f"http://127.0.0.1:{port}"

    def serve() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment(), stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        assert "dashboard at" in process.stderr.readline()
        return process

    server = serve()
    with new_tab(browser, problems, home, viewport=SIZE) as page:
        try:
            page.goto(f"{home}/?search=long")
            expect(page.locator("table.runs tbody tr")).to_have_count(1)
            assert page.get_by_role("alert").count() == 0
        finally:
            server.kill()
            server.wait()
        told = page.get_by_role("alert")
        expect(told).to_contain_text("The dashboard does not answer any more")
        expect(told).to_contain_text(f"diagnose dashboard --run-dir {root} --port {port}")
        shoot(page, "gone-1024-light")
        assert barriers(page) == []
        server = serve()
        try:
            expect(told).to_have_count(0)
            expect(page.locator("table.runs tbody tr")).to_have_count(1)
            expect(page).to_have_url(re.compile(r"\?search=long$"))
        finally:
            server.kill()
            server.wait()
    assert all("Failed to load" in words or "did not respond" in words for words in problems), problems
