"""What tuning tried, what came of it, and what the step looked like before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dash import html
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown
from diagnose.dashboards._look_run import RunPage
from diagnose.dashboards._look_tuning import is_running, tuning_of, tuning_words
from diagnose.dashboards._snapshot import Snapshot

from diagnose.core.profile import Profile, RunInfo, Status
from diagnose.core.trial import Tuning
from diagnose.core.units import format_duration
from diagnose.report import loss
from diagnose.report._tuning_words import gain
from diagnose.report.base import Fact, Facts, Paragraph
from diagnose.report.summary import sentence
from diagnose.report.tuning import TuningSection


class BeforeAfter(RunPage):
    """Every fix that was tried, predicted beside measured, and the step before and after them all."""

    name = "before-after"
    title = "Before / after"
    order = 20

    def key(self, snap: Snapshot) -> tuple[Any, ...]:
        noted = snap.loss
        return (snap.tuning, noted and (noted.width, len(noted.means)))

    def draw(self, snap: Snapshot, query: Mapping[str, str]) -> list[Component]:
        profile, tuning = snap.profile, tuning_of(snap)
        if tuning is None and profile is None:
            return [empty("Not analysed yet", _waiting(snap))]
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
        run = profile or Profile(run=RunInfo(id=snap.id, script=snap.script), status=Status.OK)
        blocks = section.blocks(replace(run, tuning=tuning))
        if is_running(snap):
            so_far = Paragraph(text=sentence(tuning_words(snap, tuning)))
            blocks = [so_far, *blocks[1:]]  # the first says what it came to in the end
        made.append(panel(section.title, *shown(blocks)))
        made.append(_loss(snap, profile, tuning))
        if profile is None:
            made.append(empty("The step before and after is not analysed yet", _waiting(snap)))
        return made


def _waiting(snap: Snapshot) -> str:
    return sentence(snap.analysis) if snap.analysis else "The first figures take a few seconds."


def _loss(snap: Snapshot, profile: Profile | None, tuning: Tuning) -> Component:
    """Shows the loss over the steps: before anything was changed, and after."""
    if snap.loss is None:
        return panel("Training loss", html.P(_why_no_loss(profile), className="words"))
    return panel(
        "Training loss",
        chart(loss.curve(snap.loss, tuning, snap.marks), height=320),
        note=loss.words(snap.loss, tuning, snap.num_steps),
    )


def _why_no_loss(profile: Profile | None) -> str:
    if profile is None:
        return "The loss was not recorded."
    if profile.run.device != "cpu":
        return (
            "The loss was not recorded. On a device it is read only where a fix may change what training"
            " computes (--allow precision, --allow training): every reading is a copy to the host."
        )
    return (
        "The loss was not recorded: an earlier version wrote this run, or no backward pass of it began at a"
        " single number."
    )


def _headline(tuning: Tuning) -> list[Fact]:
    if tuning.confirmed is None:
        return []
    confirmed, on = tuning.confirmed
    speedup, _, interval = gain(confirmed).partition(" (")
    detail = f"{interval.rstrip(')')}; {on} on against all off"
    step_ns = (confirmed.without_ns, confirmed.with_ns)
    without, within = (format_duration(time_ns) for time_ns in step_ns)
    return [
        Fact(label="confirmed", value=speedup, detail=detail),
        Fact(label="step without", value=without, detail="mean of its windows"),
        Fact(label="step with", value=within, detail="mean of its windows"),
        Fact(label="pairs of windows", value=f"{confirmed.pairs}", detail="each on and off in turn"),
    ]
