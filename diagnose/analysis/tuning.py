"""What tuning did in a run, from the events it left."""

from __future__ import annotations

from typing import Any

from diagnose.core.trial import Measured, Trial, Tuning
from diagnose.store.reader import RankLog

KINDS = (
    "tuning",
    "diagnosed",
    "trial",
    "confirmation",
    "recheck",
    "undone",
    "dropped",
    "frozen",
    "tuning_error",
    "command",
)
"""The events that are tuning's own, and commands to it: no event of the script."""


def tuning_of(log: RankLog) -> Tuning | None:
    """Returns what tuning did, or `None` if the run was not tuned."""
    details: dict[str, list[dict[str, Any]]] = {}
    for _, _, kind, detail in log.events:
        details.setdefault(kind, []).append(detail)
    states = details.get("tuning")
    if not states:
        return None
    first_change = next((each["step"] for each in states if each["state"] == "trying"), None)
    undone = details.get("undone", [])
    holds = [index for index, each in enumerate(states) if each["state"] == "holding"]
    tuned = None
    if holds and not undone:
        after = states[holds[-1] + 1 :]
        tuned = (states[holds[-1]]["step"], after[0]["step"] if after else len(log.steps))
    frozen = details.get("frozen", [{"reason": "", "in_force": ()}])[0]
    confirmations = details.get("confirmation", [])
    return Tuning(
        state=states[-1]["state"],
        diagnosed="diagnosed" in details,
        trials=tuple(Trial.from_record(each) for each in details.get("trial", ())),
        confirmation=Measured(**confirmations[-1]) if confirmations else None,
        rechecks=tuple(Measured(**each) for each in details.get("recheck", ())),
        undone=undone[-1]["reason"] if undone else "",
        dropped={each["action"]: each["reason"] for each in details.get("dropped", ())},
        errors=tuple(each["error"] for each in details.get("tuning_error", ())),
        frozen=frozen["reason"],
        in_force=tuple(frozen["in_force"]),
        untouched=(0, len(log.steps) if first_change is None else first_change),
        tuned=tuned,
    )
