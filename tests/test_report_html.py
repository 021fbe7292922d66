"""The report as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from diagnose.core.phases import Phase
from diagnose.core.profile import (
    InputStats,
)
from diagnose.report import to_html
from diagnose.report._colors import DARK_PAGE, LIGHT_PAGE, PHASE_COLORS, contrast, text_on
from tests.profiles import FAULTY, FOUR_RANKS, HEALTHY, HOSTILE, HOSTILE_PROFILE, NOTHING, PROFILE, WORKERS


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> Sequence[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_html_report_shows_every_foreign_name_as_text() -> None:
    page = Page(to_html(HOSTILE_PROFILE))
    assert not page.all("img") and not page.all("script")
    assert page.open == [], "every element is closed"
    assert page.text.count(HOSTILE) >= 21
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_html_report_loads_nothing_and_is_small() -> None:
    many = replace(
        PROFILE,
        where=tuple(replace(PROFILE.where[0], line=n, in_worker=n % 2 == 0) for n in range(1, 400)),
        ranks=FOUR_RANKS * 64,
        input=InputStats(workers=WORKERS),
    )
    page = to_html(many)
    assert len(page.encode()) < 60_000
    assert "http" not in page.replace("http-equiv", "") and "url(" not in page and "@import" not in page
    assert all("src" not in attributes and "href" not in attributes for _, attributes in Page(page).tags)


def test_html_report_can_be_read_without_seeing_it() -> None:
    page = Page(to_html(replace(PROFILE, ranks=FOUR_RANKS)))
    assert page.all("html") == [{"lang": "en"}]
    (bar,) = page.all("svg")
    assert bar["role"] == "img" and bar["aria-labelledby"] == "step-title step-desc"
    assert "data wait 50 %, copy 0.0 %, forward 20 %, backward 25 %, optimizer 3.0 %" in page.text
    tables, headers = page.all("table"), page.all("th")
    assert len(tables) == 3 and all(table["aria-label"] for table in tables)
    assert headers and all(header.get("scope") in ("col", "row") for header in headers)


def test_html_report_shows_each_finding_with_its_fix() -> None:
    page = Page(to_html(FAULTY))
    assert len(page.all("article")) == 2
    assert "2.0x (1.5 to 2.0)" in page.text and "To do Give the DataLoader two workers." in page.text
    assert "No fault found that costs 2 % of the step or more" in Page(to_html(HEALTHY)).text


def test_html_bar_is_the_whole_step() -> None:
    parts = Page(to_html(PROFILE)).all("rect")
    widths = [float((part["width"] or "").rstrip("%")) for part in parts]
    assert len(parts) == 8, "phases that took time"
    assert abs(sum(widths) - 100) < 0.01


def test_html_report_of_a_run_without_steps_has_no_bar_and_says_why() -> None:
    page = Page(to_html(NOTHING))
    assert not page.all("svg")
    assert "No optimizer step was seen in 12.3 s; torch was imported." in page.text
    assert "import diagnose; diagnose.step()" in page.text


@pytest.mark.parametrize("phase", list(Phase))
def test_phase_colours_stand_out_from_both_pages_and_carry_readable_text(phase: Phase) -> None:
    color = PHASE_COLORS[phase]
    assert contrast(color, LIGHT_PAGE) >= 3
    assert contrast(color, DARK_PAGE) >= 3
    assert contrast(color, text_on(color)) >= 4.5
