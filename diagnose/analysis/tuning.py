"""What tuning did in a run, from the events it left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diagnose.core.trial import Measured, Outcome, Trial, Tuning
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
    held = _held(log)
    holds = [index for index, each in enumerate(states) if each["state"] == "holding"]
    tuned = None
    if holds and not held.undone:
        after = states[holds[-1] + 1 :]
        tuned = (states[holds[-1]]["step"], after[0]["step"] if after else len(log.steps))
    frozen = details.get("frozen", [{"reason": "", "in_force": ()}])[0]
    return Tuning(
        state=states[-1]["state"],
        diagnosed="diagnosed" in details,
        trials=tuple(Trial.from_record(each) for each in details.get("trial", ())),
        confirmation=held.confirmation,
        rechecks=tuple(held.rechecks),
        undone=held.undone,
        dropped=held.dropped,
        errors=tuple(each["error"] for each in details.get("tuning_error", ())),
        frozen=frozen["reason"],
        in_force=tuple(frozen["in_force"]),
        untouched=(0, len(log.steps) if first_change is None else first_change),
        tuned=tuned,
    )


@dataclass(slots=True)
class _Held:
    """What is kept, and what was measured of all that is; see `Tuning`."""

    kept: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    undone: str = ""
    confirmation: Measured | None = None
    rechecks: list[Measured] = field(default_factory=list)

    def change(self) -> None:
        """What is kept is no longer what was measured."""
        self.confirmation = None
        self.rechecks.clear()


def _held(log: RankLog) -> _Held:
    """Follows what was kept and lost, in order: what is lost may be kept again later."""
    held = _Held()
    for _, _, kind, detail in log.events:
        if kind == "trial" and detail["outcome"] == Outcome.KEPT.value:
            if held.undone:
                held.dropped.update(dict.fromkeys(held.kept, held.undone))
                held.kept, held.undone = [], ""
            held.dropped.pop(detail["action"], None)
            held.kept.append(detail["action"])
            held.change()
        elif kind == "dropped":
            held.dropped[detail["action"]] = detail["reason"]
            held.kept = [name for name in held.kept if name != detail["action"]]
            held.change()
        elif kind == "undone":
            held.undone = detail["reason"]
        elif kind == "confirmation":
            held.confirmation = Measured(**detail)
        elif kind == "recheck":
            held.rechecks.append(Measured(**detail))
    return held
