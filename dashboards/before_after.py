"""What tuning tried, what came of it, and what the step looked like before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diagnose.dashboards._look_blocks import Component, empty, panel, shown
from diagnose.dashboards._look_run import body, refreshed
from diagnose.dashboards._look_tuning import is_running, tuning_of, tuning_words
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import Page, View

from diagnose.core.trial import Tuning
from diagnose.core.units import format_duration
from diagnose.report._tuning_words import gain
from diagnose.report.base import Fact, Facts, Paragraph
from diagnose.report.summary import sentence
from diagnose.report.tuning import TuningSection

NAME = "before-after"


class BeforeAfter(Page):
    """Every fix that was tried, predicted beside measured, and the step before and after them all."""

    title = "Before / after"
    order = 20

    def layout(self, view: View, source: Source) -> Any:
        """See `Page`."""
        return body(NAME)

    def callbacks(self, app: Any, source: Source) -> None:
        """See `Page`."""
        refreshed(app, source, NAME, _draw, lambda snap: (snap.tuning,))


def _draw(snap: Snapshot) -> list[Component]:
    profile = snap.profile
    if profile is None:
        return [empty("Not analysed yet", snap.analysis or "The first figures take a few seconds.")]
    tuning = tuning_of(snap)
    if tuning is None:
        words = "Nothing was changed here. With `--tune`, fixes are tried on the running job and kept"
        return [
            empty(
                "This run was not tuned",
                f"{words} only where a paired measurement shows that they help.",
                f"diagnose run --tune {snap.script}",
            )
        ]
    made = []
    headline = _headline(tuning)
    if headline:
        made += shown([Facts(items=tuple(headline), headline=True)])
    section = TuningSection()
    blocks = section.blocks(replace(profile, tuning=tuning))
    if is_running(snap):
        so_far = Paragraph(text=sentence(tuning_words(snap, tuning)))
        blocks = [so_far, *blocks[1:]]  # the first says what it came to in the end
    made.append(panel(section.title, *shown(blocks)))
    return made


def _headline(tuning: Tuning) -> list[Fact]:
    confirmed = tuning.confirmation
    if confirmed is None:
        return []
    speedup, _, interval = gain(confirmed).partition(" (")
    detail = f"{interval.rstrip(')')}; all on against all off"
    step_ns = (confirmed.without_ns, confirmed.with_ns)
    without, within = (format_duration(time_ns) for time_ns in step_ns)
    return [
        Fact(label="confirmed", value=speedup, detail=detail),
        Fact(label="step without", value=without, detail="mean of its windows"),
        Fact(label="step with", value=within, detail="mean of its windows"),
        Fact(label="pairs of windows", value=f"{confirmed.pairs}", detail="each on and off in turn"),
    ]
