"""Findings with their evidence, and the source line to blame among its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html
from diagnose.dashboards._look_blocks import Component, panel, shown
from diagnose.dashboards._source import Source

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.report._faults import no_fault, place
from diagnose.report._wording import printable
from diagnose.report.base import Paragraph
from diagnose.report.findings import card
from diagnose.report.summary import sentence

NEIGHBOURS = 3
"""Lines shown above and below the one to blame: enough to see the loop it is in."""


def findings_panel(profile: Profile, run: str, source: Source) -> Component:
    """Returns all findings, the most costly first."""
    nothing = no_fault(profile)
    if nothing:
        return panel("What slows it down", *shown([Paragraph(text=sentence(nothing))]))
    cards = [_finding(finding, profile, run, source) for finding in profile.findings]
    if not cards:
        cards = shown([Paragraph(text="Too little was measured to name a fault.")])
    return panel("What slows it down", *cards)


def _finding(finding: Finding, profile: Profile, run: str, source: Source) -> Component:
    (made,) = shown([card(finding, profile)])
    lines = source.source_lines(run, finding.file, finding.line, around=NEIGHBOURS) if finding.file else ()
    if lines:
        before = next(index for index, child in enumerate(made.children) if isinstance(child, html.Ul))
        made.children.insert(before + 1, excerpt(place(finding), finding.line, lines))
    return made


def excerpt(place: str, blamed: int, lines: Sequence[tuple[int, str]]) -> Component:
    """Returns a few lines of the script; the one to blame is marked by more than its colour."""
    items = [
        html.Li(
            [html.Span(f"{number}", className="n"), html.Code(printable(text.expandtabs(4)) or " ")],
            className="blamed" if number == blamed else "",
            **({"aria-current": "true"} if number == blamed else {}),
        )
        for number, text in lines
    ]
    label = f"Source around {printable(place)}"
    return html.Div(
        [
            html.Div(printable(place), className="file"),
            html.Ol(items, tabIndex=0, **{"aria-label": label}),
        ],
        className="excerpt",
    )
