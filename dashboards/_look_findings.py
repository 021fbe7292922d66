"""Findings with their evidence, and the source line to blame among its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html
from diagnose.dashboards._look_blocks import Component, shown
from diagnose.dashboards._source import Source

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.report._faults import no_fault
from diagnose.report._wording import place, printable
from diagnose.report.base import Paragraph
from diagnose.report.findings import card
from diagnose.report.summary import sentence

NEIGHBOURS = 3
"""Lines shown above and below the one to blame: enough to see the loop it is in."""


def findings(profile: Profile, run: str, source: Source) -> list[Component]:
    """Returns all findings, the most costly first; or why there are none."""
    nothing = no_fault(profile)
    if nothing:
        return shown([Paragraph(text=sentence(nothing))])
    cards = [_finding(finding, profile, run, source) for finding in profile.findings]
    return cards or shown([Paragraph(text="Too little was measured to name a fault.")])


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
            printable(text.expandtabs(4)) or " ",
            **({"className": "blamed", "aria-current": "true"} if number == blamed else {}),
        )
        for number, text in lines
    ]
    label = f"Source around {printable(place)}"
    return html.Div(
        [
            html.Div(printable(place), className="file"),
            html.Ol(items, start=lines[0][0], tabIndex=0, **{"aria-label": label}),
        ],
        className="excerpt",
    )
