"""What the reader can ask of a running job, and what it answered."""

from __future__ import annotations

from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, html
from diagnose.dashboards._look_blocks import Component, panel
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards._source import Source

from diagnose.core.trial import ASKED_FOR, Safety
from diagnose.report._tuning_words import named
from diagnose.report._wording import printable

PLAIN = {
    "pause-tuning": "Pause tuning",
    "resume-tuning": "Resume tuning",
    "deep-window": "Take a deep window",
}
MAX_ANSWERS = 6
"""Newest answers shown; all of them are marks in the run."""


CHOOSE, NOTHING = "choose one", "nothing yet"


def control_panel() -> Component:
    """Returns the buttons; `register` brings them to life, and hides them where nothing listens."""
    safeties = [{"label": safety.value, "value": safety.value} for safety in Safety]
    plain = [
        html.Button(words, id={"kind": "ask", "what": kind}, n_clicks=0, className="ask")
        for kind, words in PLAIN.items()
    ]
    classes = html.Div(
        [
            dmc.Select(
                data=safeties,
                value=ASKED_FOR[0].value,
                id="control-class",
                label="Fixes that are",
                allowDeselect=False,
                className="short",
            ),
            html.Button("Allow", id={"kind": "ask", "what": "allow"}, n_clicks=0, className="ask"),
            html.Button("Forbid", id={"kind": "ask", "what": "forbid"}, n_clicks=0, className="ask"),
        ],
        className="asked",
    )
    undo = html.Div(
        [
            dmc.Select(
                data=[], id="control-action", label="In force", placeholder=NOTHING, className="short"
            ),
            html.Button("Undo", id={"kind": "ask", "what": "undo"}, n_clicks=0, className="ask"),
        ],
        className="asked",
    )
    return html.Div(
        panel(
            "Control",
            html.Div(plain, className="asked"),
            classes,
            undo,
            html.P(id="control-answer", className="note", role="status"),
            html.Ul(id="control-log", className="log"),
            note="The job takes a command at the end of a step, and logs it in the run.",
        ),
        id="control",
        hidden=True,
    )


def register(app: Any, source: Source) -> None:
    """Registers the buttons."""

    @app.callback(  # type: ignore[untyped-decorator]
        Output("control-answer", "children"),
        Input({"kind": "ask", "what": dash.ALL}, "n_clicks"),
        State("view", "data"),
        State("control-class", "value"),
        State("control-action", "value"),
        prevent_initial_call=True,
    )
    def ask(clicks: list[int], view: dict[str, Any] | None, safety: str | None, action: str | None) -> Any:
        asked = dash.ctx.triggered_id
        if not any(clicks) or not asked or not view or not view.get("run"):
            return dash.no_update
        kind = str(asked["what"])
        argument = {"allow": safety, "forbid": safety, "undo": action}.get(kind, "") or ""
        if kind == "undo" and not argument:
            return "Choose a fix that is in force."
        return printable(source.command(str(view["run"]), kind, argument))


def control_of(snap: Snapshot) -> tuple[bool, list[dict[str, str]], str, list[Component]]:
    """Returns whether to hide the panel, the fixes that can be undone, what stands where none is chosen,
    and what the job answered."""
    kept = snap.tuning.kept if snap.tuning is not None else ()
    actions = [{"label": named(trial), "value": trial.action} for trial in kept]
    answers = [mark for mark in snap.marks if mark.kind == "command"][-MAX_ANSWERS:]
    log = [html.Li(f"step {mark.step + 1:,}: {printable(mark.label)}") for mark in reversed(answers)]
    return bool(snap.refuses), actions, CHOOSE if actions else NOTHING, log
