"""The events of tuning and commands as marks on a chart, and as the state of tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.analysis.tuning import KINDS, tuning_of
from diagnose.core.deep_window import KIND as DEEP
from diagnose.core.ledger import COLUMNS
from diagnose.core.trial import Measured, Outcome, Trial, Tuning
from diagnose.report._charts import Mark
from diagnose.report._tuning_words import TOLD, gain, named
from diagnose.store.reader import RankLog
from diagnose.store.tail import Event

EVENTS = (*KINDS, DEEP)
"""The events that are read: tuning's own, commands, and deep windows."""

MAX_MARKS = 100
"""More than this a chart neither shows nor sends in time: then the newest, without what comes often."""

BAD_EVENT = (KeyError, TypeError, ValueError)
"""What a torn or foreign event raises; it is left out."""


def marks_of(events: Sequence[Event]) -> tuple[Mark, ...]:
    """Returns what happened, in order, as the events of the first rank tell it."""
    marks = []
    for event in events:
        try:
            label, strong = _label(event.kind, event.detail)
        except BAD_EVENT:
            continue
        if label:
            marks.append(Mark(step=event.step, label=label, strong=strong, kind=event.kind))
    if len(marks) > MAX_MARKS:
        telling = [mark for mark in marks if mark.kind not in ("recheck", "tuning")]
        marks = telling[-MAX_MARKS:]
    return tuple(marks)


def tuning_so_far(events: Sequence[Event], num_steps: int) -> Tuning | None:
    """Returns what tuning did so far; `None` where the run is not tuned, or its events are damaged."""
    log = RankLog(
        path=Path(),
        steps=np.broadcast_to(np.zeros(1, dtype=np.int64), (num_steps, len(COLUMNS))),
        events=[(event.time_ns, event.step, event.kind, event.detail) for event in events],
    )
    try:
        return tuning_of(log)
    except BAD_EVENT:
        return None


def _label(kind: str, detail: dict[str, Any]) -> tuple[str, bool]:
    """Returns what happened in a few words, and whether it changed the run to its end."""
    if kind == "trial":
        trial = Trial.from_record(detail)
        won = f" {gain(trial.measured)}" if trial.measured is not None else ""
        return f"{named(trial)} {TOLD[trial.outcome]}{won}", trial.outcome is Outcome.KEPT
    if kind in ("confirmation", "recheck"):
        return (
            f"{'confirmed' if kind == 'confirmation' else 'measured again'} {gain(Measured(**detail))}",
            False,
        )
    if kind == "tuning":
        return str(detail["state"]), False
    if kind == "undone":
        return f"everything undone: {detail['reason']}", True
    if kind == "dropped":
        return f"{detail['action']} undone: {detail['reason']}", True
    if kind == "over":
        return f"{detail['action']}: nothing is left that it worked on", False
    if kind == "frozen":
        return f"tuning stopped: {detail['reason']}", True
    if kind == "tuning_error":
        return "tuning failed; everything was undone", True
    if kind == "command":
        asked = f"{detail['command']} {detail.get('argument', '')}".strip()
        reason = f" ({detail['reason']})" if detail.get("reason") else ""
        return f"{asked}: {detail['state']}{reason}", False
    if kind == DEEP:
        reason = f" ({detail['reason']})" if detail.get("reason") else ""
        return f"deep window {detail['state']}{reason}", False
    return "", False
