"""Makes the pictures in `docs/images`, from runs that it records itself.

    python benchmarks/pictures.py [--out docs/images]

Three runs are recorded with `diagnose run`: a job that decodes its pictures on the training thread, the
same with workers, and a tuned one that waits for storage. They take some two minutes, and are kept in
`.diagnose/pictures`: what lies there is not recorded again. Then the dashboard serves them, and Chromium
takes the pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dashboard_pages import CHROMIUM
from diagnose.dashboards._server import create_app, server_of
from playwright.sync_api import Page, expect, sync_playwright

from diagnose.launch.opened import listening_on

REPOSITORY = Path(__file__).absolute().parents[1]
ROOT = REPOSITORY / ".diagnose" / "pictures"
EXAMPLE = "examples/image_classifier.py"
JOB = "benchmarks/tuning/storage.py"
WIDTH = 1280
PATIENCE_MS = 120_000
"""An analysis on a busy machine."""

SETTLED_TICKS = 5
"""A page that has not changed for so many seconds shows all that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture.

    Attributes:
        address: The view.
        words: What it says once all of it is there.
        height: How much of it is shown, in pixels.
        dark: Whether it is taken in the dark.
        part: What stands at its top; empty for the page's own.
    """

    address: str
    words: str
    height: int
    dark: bool = False
    part: str = ""


RUNS = {
    "pictures": (EXAMPLE, "--epochs", "3"),
    "pictures-workers": (EXAMPLE, "--epochs", "3", "--workers", "2"),
    "storage-tuned": ("--tune", JOB, "--steps", "3500"),
}
PICTURES = {
    "runs": Picture(address="/", words="loads its own batches", height=560),
    "run": Picture(address="/run/storage-tuned", words="confirmed on against off", height=980),
    "findings": Picture(address="/run/pictures", words="To do", height=900, part=".finding"),
    "before-after": Picture(
        address="/run/storage-tuned/before-after", words="Training loss", height=1800, dark=True
    ),
    "input": Picture(address="/run/pictures-workers/input", words="The slowest batches", height=1200),
    "compare": Picture(
        address="/compare?a=pictures&b=pictures-workers", words="Metric by metric", height=1000
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.absolute()
    os.chdir(REPOSITORY)  # so that no picture names a folder of this machine
    for name, command in RUNS.items():
        if not (ROOT / name / "run.json").is_file():
            record(name, command)
    with served() as address:
        for name, picture in PICTURES.items():
            with opened(dark=picture.dark, height=picture.height) as page:
                take(page, address, picture, out / f"{name}.png")
            print(out / f"{name}.png")


def record(name: str, command: tuple[str, ...]) -> None:
    run = [sys.executable, "-m", "diagnose", "run", "--quiet", "--name", name, "--run-dir", str(ROOT)]
    subprocess.run([*run, *command], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def served() -> Iterator[str]:
    app = create_app(ROOT)
    listening = listening_on("127.0.0.1", 0)
    server = server_of(app, listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.shutdown()
        server.server_close()
        app.source.close()


@contextlib.contextmanager
def opened(*, dark: bool, height: int) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        scheme = "dark" if dark else "light"
        try:
            size = {"width": WIDTH, "height": height}
            yield browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        finally:
            browser.close()


def take(page: Page, address: str, picture: Picture, path: Path) -> None:
    page.goto(address + picture.address)
    expect(page.locator("#page")).to_contain_text(picture.words, timeout=PATIENCE_MS)
    before, since = "", 0
    while since < SETTLED_TICKS:  # what is analysed, and what plotly draws, comes by and by
        page.wait_for_timeout(1000)
        now = page.locator("#page").inner_text()
        before, since = now, since + 1 if now == before else 0
    if picture.part:
        top = page.locator(picture.part).first.evaluate("part => part.getBoundingClientRect().top")
        page.evaluate("top => window.scrollTo(0, top)", top - 120)  # below the bar
        page.wait_for_timeout(300)
    page.screenshot(path=path)


if __name__ == "__main__":
    main()
