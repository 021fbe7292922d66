"""An example tuned with its page open: the step time falls, and a mark says what did it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from diagnose.core.units import format_gain, format_speedup
from tests.browsing import Drawn, barriers, drawn, launched, needs_browser, new_tab, shoot
from tests.running import DIAGNOSE, REPOSITORY, environment, run

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from dashboard_pages import served

EXAMPLE = REPOSITORY / "examples" / "image_classifier.py"
ARGUMENTS = "--data pictures --train-pictures 640 --test-pictures 32 --epochs 200"
PATIENCE_S = 300
"""A trial takes some hundred steps of a tenth of a second."""

USUAL = slice(3, 20)
"""Steps that nothing was changed in, behind those that warm up."""

AFTERWARDS = 60
"""So many steps behind the mark are looked at."""

pytestmark = [
    needs_browser,
    pytest.mark.alone,  # the fix takes a second CPU, and a trial must be able to tell
    pytest.mark.extended,
    pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed"),
]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = (*DIAGNOSE, "--tune", "--dashboard", "--name", "images", str(EXAMPLE), *ARGUMENTS.split())
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),  # threads wait for each other on a busy machine
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def kept(page: Page, process: subprocess.Popen[bytes]) -> tuple[Drawn, float]:
    """Waits until the charts mark a fix as kept, and show steps behind it; returns them, and the step."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        page.wait_for_timeout(1000)
        shown = drawn(page)
        if shown.kept_at is not None and shown.step[-1] > shown.kept_at + AFTERWARDS:
            return shown, shown.kept_at
    pytest.fail(
        f"no fix was kept, or the job ended: {process.poll()}, {page.locator('.title').inner_text()}"
    )


def test_the_step_time_falls_and_the_action_that_did_it_is_marked(
    job: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    folder = tmp_path / ".diagnose" / "runs" / "images"
    while not (folder / "dashboard.url").exists():
        assert job.poll() is None
        time.sleep(0.1)
    address = (folder / "dashboard.url").read_text().strip()
    home, problems = address.partition("/run/")[0], []
    seen = {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "light"}
    with launched() as browser, new_tab(browser, problems, home, **seen) as page:
        page.goto(address)
        expect(page.locator("#run-throughput .main-svg").first).to_be_visible(timeout=1000 * PATIENCE_S)
        shown, kept_at = kept(page, job)
        before = (shown.step >= USUAL.start) & (shown.step < USUAL.stop)
        after = (shown.step > kept_at) & (shown.step <= kept_at + AFTERWARDS)
        assert np.median(shown.step_ms[after]) < 0.9 * np.median(shown.step_ms[before])
        assert np.median(shown.rate[after]) > 1.1 * np.median(shown.rate[before])
        assert barriers(page) == []
        shoot(page, "example-tuned-1280-light")
        page.locator("#control-action").click()
        page.get_by_role("option").first.click()
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#control-log")).to_contain_text("undo")
        # What is being confirmed is measured to its end before.
        expect(page.locator("#control-log")).to_contain_text(": done", timeout=1000 * PATIENCE_S)
    assert problems == []
    os.killpg(job.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    job.wait(timeout=60)
    told = run(sys.executable, "-m", "diagnose", "report", "images", "--json", "-", cwd=tmp_path)
    report = json.loads(told.stdout)
    with (
        served(folder.parent) as site,
        launched() as browser,
        new_tab(browser, problems, site.address, **seen) as page,
    ):
        page.goto(f"{site.address}/run/images/before-after")
        body = page.locator("#page")
        expect(body).to_contain_text("Training loss")
        for trial in report["trials"]:
            expect(body).to_contain_text(trial["action"])
            if trial["predicted_speedup"] is not None:
                expect(body).to_contain_text(format_speedup(trial["predicted_speedup"]))
            if trial["measured_speedup"] is not None:
                expect(body).to_contain_text(format_gain(trial["measured_speedup"], *trial["ci"]))
        shoot(page, "example-before-after-1280-light")
    assert problems == []
