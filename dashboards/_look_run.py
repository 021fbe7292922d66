"""What the pages of one run have in common: how it stands, and the words that come first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import dash
from dash import Input, Output, State, dcc, html
from diagnose.dashboards._look_blocks import Component, empty
from diagnose.dashboards._look_tuning import is_running, tuning_of, tuning_words
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import Page, View

from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import State as Alive
from diagnose.core.profile import Profile
from diagnose.core.trial import Tuning
from diagnose.core.units import format_share
from diagnose.report._faults import gain, headline, lost, lost_share, no_fault
from diagnose.report._wording import (
    coverage,
    failure,
    how_it_ended,
    likely_reason,
    nothing_measured,
    outcome,
    plural,
    printable,
    too_few,
    what_to_do_without_steps,
)
from diagnose.report.summary import sentence

READING = html.P("Reading the run ...", className="reading", role="status")
"""What a page shows until the first figures are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a reader should know first.

    Attributes:
        tone: `good`, `alarm`, or empty.
        first: The one sentence.
        more: What follows it.
        code: What to paste.
    """

    tone: str = ""
    first: str
    more: tuple[str, ...] = ()
    code: str = ""


def verdict_of(snap: Snapshot) -> Verdict:
    """Says in words what is known of the run."""
    profile = known(snap)
    tuned = tuning_of(snap)
    if profile is None:
        known_so_far = [f"{plural(snap.num_steps, 'step')}{' so far' if is_running(snap) else ''}."]
        if tuned is not None:
            known_so_far.append(sentence(tuning_words(snap, tuned)))
        return Verdict(first=sentence(snap.analysis or "being analysed"), more=tuple(known_so_far))
    if is_running(snap) and profile.steps.measured <= 0 and not profile.run.lost:
        return Verdict(first="No step has been measured yet.")
    failed = failure(profile) if snap.over else None
    more = []
    if failed and profile.steps.measured > 0:
        more.append(sentence(coverage(profile)))
    reason = likely_reason(profile.run) if failed else None
    if reason:
        more.append(sentence(reason))
    found = _findings(profile)
    if snap.left_out:
        found = replace(found, more=(*found.more, snap.left_out))
    if failed:
        first = sentence(f"the {failed}")
        return Verdict(tone="alarm", first=first, more=(*more, found.first, *found.more))
    if tuned is not None and tuned.kept:
        words = sentence(tuning_words(snap, tuned))
        return Verdict(tone="good", first=words, more=(found.first, *found.more))
    tried = (sentence(tuning_words(snap, tuned)),) if tuned is not None and _has_words(tuned) else ()
    return replace(found, more=(*found.more, *tried))


def known(snap: Snapshot) -> Profile | None:
    """Returns the profile with what became known since it was made: that records are lost."""
    profile = snap.profile
    if profile is None or not snap.lost:
        return profile
    return replace(profile, run=replace(profile.run, lost=snap.lost))


def _findings(profile: Profile) -> Verdict:
    if profile.steps.measured <= 0:
        advice, code = what_to_do_without_steps(profile)
        return Verdict(first=sentence(nothing_measured(profile)), more=(advice,), code=code)
    doubt = too_few(profile)
    if doubt:
        return Verdict(first=sentence(doubt))
    nothing = no_fault(profile)
    if nothing or not profile.findings:
        return Verdict(tone="good" if nothing else "", first=sentence(nothing or "no rule was asked"))
    top = profile.findings[0]
    without = "without it" if top.fix_won_ns is None else "with its fix"
    cost = f"It costs {lost(top)} per step, {lost_share(top, profile)} of it; {without} training would be "
    others = len(profile.findings) - 1
    rest = (f"{plural(others, 'more finding')} below.",) if others else ()
    return Verdict(first=f"{headline(top)}.", more=(f"{cost}{gain(top, profile)} as fast.", *rest))


def _has_words(tuning: Tuning) -> bool:
    return bool(tuning.trials or tuning.errors or tuning.frozen or tuning.undone)


def verdict_box(snap: Snapshot) -> Component:
    """Shows the words that come first."""
    words = verdict_of(snap)
    code = [html.P(html.Code(words.code))] if words.code else []
    return html.Div(
        [
            html.P(printable(words.first), className="first"),
            *(html.P(printable(text)) for text in words.more),
            *code,
        ],
        className=f"verdict {words.tone}".strip(),
        role="status",
    )


def badge(snap: Snapshot) -> Component:
    """Says how the run stands, in words and colour."""
    state = snap.liveness.state
    if state is Alive.RUNNING:
        return html.Span(printable(snap.words), className="badge live")
    if state is Alive.ENDED:
        # What was analysed while the run went on does not know how it ended.
        known_end = snap.profile.run if snap.profile is not None and snap.over else None
        if known_end is None or how_it_ended(known_end) is None:
            return html.Span("ended", className="badge")
        return html.Span(printable(outcome(known_end)), className="badge alarm")
    return html.Span(printable(snap.words), className="badge warn")


def title(snap: Snapshot, name: str) -> Component:
    """Returns the head of a page: which run it is about and how it stands."""
    ranks = f" · {snap.world_size} ranks" if snap.world_size > 1 else ""
    command = " ".join((snap.script, *snap.argv))
    under = f"{snap.id} · {snap.started[:19].replace('T', ' ')} · {plural(snap.num_steps, 'step')}{ranks}"
    return html.Div(
        [
            html.P(name, className="eyebrow"),
            html.Div(
                [html.H1(html.Code(printable(command))), badge(snap), *_filling(snap)], className="row"
            ),
            html.P(printable(under), className="under"),
            *(html.P(printable(note), className="alarm") for note in snap.notes),
        ],
        className="title",
    )


def _filling(snap: Snapshot) -> list[Component]:
    """Says how much of a long run is still to be read: the newest part comes first."""
    if not snap.num_steps or snap.filled_share >= 1:
        return []
    return [html.Span(f"history {format_share(snap.filled_share)} read", className="badge calm")]


class RunPage(Page):
    """A page of one run, drawn again on a tick, but only where what it shows is no longer what it showed.

    Its title says how the run stands and follows every look at it; the body is larger and follows its key.

    Attributes:
        name: The page, as the address has it.
    """

    name: ClassVar[str]

    def draw(self, snap: Snapshot, query: Mapping[str, str]) -> Sequence[Component]:
        """Returns the body of the page, for what the address asks for."""
        raise NotImplementedError

    def key(self, snap: Snapshot) -> tuple[Any, ...]:
        """Returns what the body depends on, beside the analysis."""
        return ()

    def layout(self, view: View, source: Source) -> Any:
        """See `Page`: the body is empty until the first tick."""
        return html.Div(
            [
                dcc.Store(id=f"{self.name}-drawn"),
                html.Div(READING, id=f"{self.name}-title"),
                html.Div(id=f"{self.name}-body"),
            ]
        )

    def callbacks(self, app: Any, source: Source) -> None:
        @app.callback(  # type: ignore[untyped-decorator]
            Output(f"{self.name}-title", "children"),
            Output(f"{self.name}-body", "children"),
            Output(f"{self.name}-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            State(f"{self.name}-drawn", "data"),
        )
        def refresh(_: int, view: dict[str, Any] | None, drawn: dict[str, str] | None) -> tuple[Any, ...]:
            same = (dash.no_update, dash.no_update, dash.no_update)
            if not view or view.get("page") != self.name or not view.get("run"):
                return same
            try:
                snap = source.run(view["run"]).snapshot()
            except DiagnoseError as error:
                return None, empty("This run cannot be shown", str(error)), None
            if not snap.version:  # of a thousand ranks the first look takes a few seconds
                return READING, None, None
            query = view.get("query") or {}
            analysed = (snap.analysed_steps, snap.profile is None, snap.over, snap.lost)
            new = {
                "title": f"{snap.id}/{snap.version}",
                "body": _stamp((snap.id, snap.started, analysed, query, *self.key(snap))),
            }
            drawn = drawn or {}
            if new == drawn:
                return same
            if new["body"] == drawn.get("body"):
                return title(snap, self.title), dash.no_update, new
            return title(snap, self.title), self.draw(snap, query), new


def _stamp(parts: tuple[Any, ...]) -> str:
    return hashlib.sha1(repr(parts).encode(), usedforsecurity=False).hexdigest()
