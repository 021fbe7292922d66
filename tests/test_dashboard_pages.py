"""The pages of the dashboard in a real browser, on real runs and on a job that trains meanwhile."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from diagnose.core.units import NS_PER_MS, format_duration, format_gain, format_part, format_speedup
from tests.browsing import (
    WAITING,
    barriers,
    drawn,
    fits,
    go,
    launched,
    name_of,
    needs_browser,
    new_tab,
    shoot,
)
from tests.mixing import mostly_extended
from tests.running import DIAGNOSE, SCRIPTS, environment, run, write

pytestmark = needs_browser
HOSTILE = "<img src=x onerror=alert(1)>.py"
WIDTHS = (390, 1024, 1920)

CRASH = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    time.sleep(0.003)  # the wait
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
raise ValueError("<b>enough</b>")
"""
LIVE = """
import sys, time, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), float(index))

if __name__ == "__main__":
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Slow(), batch_size=4, shuffle=True)
    while not Path("stop").exists():
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
"""
PAGES = {
    "/": "Runs",
    "/run/live": "Where each step goes",
    "/run/live/before-after": "What tuning did",
    "/run/live/input": "Loaders",
    "/run/live/kernels": "No deep window was taken",
    "/gate-history": "No baselines yet",
    "/run/ranks/ranks": "How late each rank is",
    "/compare?a=crash&b=ranks": "Metric by metric",
}

ENDED = {"/": "loads its own batches"}
"""What the list says once the rules have answered."""


@dataclass(slots=True)
class Site:
    """A dashboard that serves, and what it serves."""

    address: str
    entrance: str
    folder: Path
    live: subprocess.Popen[str]
    problems: list[str] = field(default_factory=list)


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("dashboard")
    runs = ("--run-dir", str(folder / ".diagnose" / "runs"), "--quiet")
    jobs = (
        (*runs, "--name", "live", "--tune", write(folder / "live.py", LIVE)),
        (*runs, "--name", "crash", write(folder / HOSTILE, CRASH)),
        (
            *runs,
            "--name",
            "ranks",
            "--nproc-per-node",
            "2",
            "--deep-window",
            "20:5",
            SCRIPTS / "two_ranks.py",
            "80",
        ),
    )
    serve = (sys.executable, "-m", "diagnose", "dashboard", "--port", "0", "--no-open", *runs[:2])
    options = {"cwd": folder, "env": environment(OMP_NUM_THREADS="1"), "text": True}
    started = [
        subprocess.Popen(
            [*DIAGNOSE, *map(str, job)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
        )
        for job in jobs
    ]
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    assert server.stderr is not None
    try:
        told = next((line for line in server.stderr if "http://" in line), "")
        address = re.search(r"(http://127\.0\.0\.1:\d+)\S*", told)
        assert address, "it says where it serves"
        yield Site(address=address[1], entrance=address[0], folder=folder, live=started[0])
    finally:
        (folder / "stop").touch()
        for job in started:
            job.wait(timeout=60)
        stopped(server)


@pytest.fixture(scope="module")
def tab(site: Site) -> Iterator[Page]:
    """One tab for all tests: loading the libraries anew for each would take most of the time."""
    seen = {"viewport": {"width": 1024, "height": 900}, "color_scheme": "light"}
    with launched() as browser, new_tab(browser, site.problems, site.address, **seen) as opened:
        opened.goto(site.entrance)
        expect(opened.locator("#page")).to_contain_text("newest first")  # behind the door's redirection
        yield opened


@pytest.fixture
def page(site: Site, tab: Page) -> Iterator[Page]:
    """The tab; the test fails if the browser complained, or asked anybody else for anything."""
    site.problems.clear()
    yield tab
    assert site.problems == []


@pytest.mark.parametrize(
    "address, words",
    mostly_extended(
        {name_of(address): (address, words) for address, words in PAGES.items()},
        *map(name_of, ("/", "/run/live/before-after")),
    ),
)
def test_a_page_opens_by_its_address_without_barriers_and_fits_a_phone(
    site: Site, page: Page, address: str, words: str
) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, address)
    expect(page.locator("#page")).to_contain_text(words)
    shoot(page, f"{name_of(address)}-1024-light")
    assert barriers(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert fits(page)


def test_a_live_run_moves_by_itself(site: Site, page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/run/live")
    expect(page.locator(".badge.live")).to_contain_text("running")
    expect(page.locator("#run-ledger .main-svg").first).to_be_visible()
    expect(page.locator(".title .alarm")).to_have_count(0)
    under = page.locator("#run-title .under")
    before = under.inner_text()
    expect(under).not_to_have_text(before)
    go(page, "/run/live/before-after")
    expect(page.locator("#page")).to_contain_text("What tuning did")
    assert "ended" not in page.locator("#page").inner_text(), "nothing is said of an end that has not come"


def test_a_command_reaches_the_job_and_its_answer_comes_back(page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/run/live")
    expect(page.locator("#control-answer")).to_be_empty()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#control-answer")).to_have_text("Choose a fix that is in force.")
    page.get_by_role("button", name="Pause tuning").click()
    expect(page.locator("#control-answer")).to_contain_text("Handed over")
    expect(page.locator("#control-log li").first).to_contain_text("pause-tuning")
    for asked in ("Allow", "Forbid", "Resume tuning", "Take a deep window"):
        page.get_by_role("button", name=asked).click()
        expect(page.locator("#control-answer")).to_contain_text("Handed over")
    for answered in (
        "forbid precision: done",
        "resume-tuning: done",
        "deep-window: waiting (it is taken as soon as no fix is being tried)",
    ):
        expect(page.locator("#control-log")).to_contain_text(answered)
    shoot(page, "run-live-control-1024-light")


@pytest.mark.extended
def test_the_step_time_falls_where_a_kept_fix_is_marked(page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/run/live")
    mark = page.locator("#run-throughput .annotation-text", has_text=" kept").first
    expect(mark).to_be_visible()
    shown = drawn(page)
    assert shown.kept_at is not None
    after = shown.step_ms[shown.step > shown.kept_at]
    assert np.median(after) < shown.step_ms[0] / 2, "the cache takes nearly all of the step away"
    shoot(page, "run-live-kept-1024-light")


def test_the_verdict_the_finding_and_the_line_to_blame_are_shown(page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/run/crash")
    expect(page.locator(".verdict")).to_contain_text("The script failed with ValueError after 60 steps.")
    expect(page.locator(".finding").first).to_contain_text("time.sleep(0.003)")
    blamed = page.locator(".excerpt li.blamed")
    expect(blamed).to_contain_text("time.sleep(0.003)  # the wait")
    shoot(page, "run-crash-1024-light")


def test_a_hostile_name_is_only_text(page: Page) -> None:
    go(page, "/run/crash")
    expect(page.locator("h1")).to_contain_text(HOSTILE)
    assert (
        page.locator("#page img[src=x]").count() == 0
        and page.locator("#page b:text('enough')").count() == 0
    )
    go(page, "/")
    expect(page.locator("table.runs")).to_contain_text(HOSTILE)
    assert page.locator("#page img[src=x]").count() == 0


def test_no_chart_offers_to_upload_itself(page: Page) -> None:
    go(page, "/run/crash")
    expect(page.locator("#run-ledger .main-svg").first).to_be_visible()
    page.locator("#run-ledger").hover()
    assert page.locator("[data-title*='Share'], [data-title*='Cloud'], .modebar-btn").count() == 0


@pytest.mark.extended
def test_runs_are_searched_filtered_and_picked_for_a_comparison(site: Site, page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(3)
    page.get_by_label("Search").fill("onerror")
    expect(rows).to_have_count(1)
    page.get_by_label("Search").fill("no such run")
    expect(page.locator("#page")).to_contain_text("No run matches")
    page.get_by_label("Search").fill("")
    expect(rows).to_have_count(3)
    page.get_by_text("Running", exact=True).click()
    expect(rows).to_have_count(1)
    assert page.url.endswith("state=running"), "what is chosen is in the address"
    page.get_by_text("All", exact=True).click()
    expect(rows).to_have_count(3)
    for name in ("crash", "ranks"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("link", name="Compare the two").click()
    expect(page.locator(".verdict")).to_contain_text("two single runs must differ by")


def test_the_keyboard_reaches_the_pages_and_skips_to_the_content(site: Site, page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    page.goto(f"{site.address}/run/crash")
    expect(page.locator(".finding").first).to_be_visible()
    focused = "document.activeElement.textContent"
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    assert reached[0] == "Skip to the page"
    assert {"diagnose", "Runs", "Overview", "Input"} <= set(reached)
    page.get_by_role("link", name="Input").focus()
    page.keyboard.press("Enter")
    expect(page.locator("nav [aria-current=page]")).to_have_text("Input")
    assert page.url.endswith("/run/crash/input")


@pytest.mark.extended
def test_dark_is_one_key_away_and_stays(site: Site, page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/run/crash")
    scheme = "document.documentElement.dataset.mantineColorScheme"
    assert page.evaluate(scheme) == "light", "as the system has it"
    page.get_by_label("Switch between dark and light").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(scheme) == "dark"
    page.reload()
    expect(page.locator(".finding").first).to_be_visible()
    assert page.evaluate(scheme) == "dark"
    shoot(page, "run-crash-1024-dark")
    assert barriers(page) == []
    page.get_by_label("Switch between dark and light").click()


def test_an_address_that_leads_nowhere_says_so(page: Page) -> None:
    go(page, "/run/..%2f..%2fetc")
    expect(page.locator("#page")).to_contain_text("Nothing here")
    go(page, "/no-such-page")
    expect(page.locator("#page")).to_contain_text("Nothing here")


def test_before_and_after_agree_with_the_json_to_the_digit(site: Site, page: Page) -> None:
    (site.folder / "stop").touch()
    site.live.wait(timeout=60)
    ended = run(
        *(sys.executable, "-m", "diagnose", "report", "live", "--json", "-"),
        *("--run-dir", site.folder / ".diagnose" / "runs"),
        cwd=site.folder,
    )
    report = json.loads(ended.stdout)
    go(page, "/run/live/before-after")
    expect(page.locator("#page")).to_contain_text("ended")
    body = page.locator("#page")
    assert report["trials"], "the job lived long enough for a trial"
    for trial in report["trials"]:
        expect(body).to_contain_text(trial["action"])
        if trial["predicted_speedup"] is not None:
            expect(body).to_contain_text(format_speedup(trial["predicted_speedup"]))
        if trial["measured_speedup"] is not None:
            expect(body).to_contain_text(format_gain(trial["measured_speedup"], *trial["ci"]))
    expect(body).to_contain_text("Of the first rank, as its backward passes began.")
    confirmed = report["confirmation"]
    if confirmed:
        value, _, interval = format_gain(confirmed["speedup"], *confirmed["ci"]).partition(" (")
        expect(page.locator(".kpis")).to_contain_text(value)
        expect(page.locator(".kpis")).to_contain_text(interval.rstrip(")"))
        for step_ms in confirmed["step_ms"]:
            expect(page.locator(".kpis")).to_contain_text(format_duration(step_ms * NS_PER_MS))
        step_ms = sum(phase["ms_per_step"] for phase in report["phases"])
        wait_ms = next(p["ms_per_step"] for p in report["phases"] if p["name"] == "data_wait")
        expect(body).to_contain_text(format_part(wait_ms * NS_PER_MS, step_ms * NS_PER_MS))
    shoot(page, "run-live-before-after-ended-1024-light")


@pytest.mark.extended
def test_the_operations_of_a_deep_window_are_shown(page: Page) -> None:
    page.set_viewport_size({"width": 1024, "height": 900})
    go(page, "/run/ranks/kernels")
    for words in ("By class", "Operations", "optimizer"):
        expect(page.locator("#page")).to_contain_text(words)
    page.mouse.move(500, 500)  # away from the switch that an earlier test has clicked
    assert barriers(page) == []
    shoot(page, "run-ranks-kernels-1024-light")


@pytest.mark.extended
def test_every_page_is_photographed_in_both_schemes_at_three_widths(site: Site, page: Page) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for address, words in PAGES.items():
            go(page, address)
            expect(page.locator("#page")).to_contain_text(ENDED.get(address, words))
            expect(page.locator(WAITING)).to_have_count(0)
            expect(page.locator("#page")).not_to_contain_text(re.compile("being analysed|Not analysed"))
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_timeout(300)  # plotly draws anew
                shoot(page, f"{name_of(address)}-{width}-{scheme}")
