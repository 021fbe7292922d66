"""What tuning did in a run, from the events it left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "over",
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
        left=_left(details.get("diagnosed", [])),
        trials=_told_once([Trial.from_record(each) for each in details.get("trial", ())]),
        confirmation=held.confirmation,
        earlier=held.earlier,
        num_earlier=held.num_earlier,
        rechecks=tuple(held.rechecks),
        undone=held.undone,
        dropped=held.dropped,
        errors=tuple(each["error"] for each in details.get("tuning_error", ())),
        frozen=frozen["reason"],
        in_force=tuple(frozen["in_force"]),
        untouched=(0, len(log.steps) if first_change is None else first_change),
        left_alone=None if held.kept_any or frozen["in_force"] else _left_alone(log, states),
        tuned=tuned,
    )


def _left_alone(log: RankLog, states: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    last = max((index for index, each in enumerate(states) if each["state"] == "trying"), default=None)
    if last is None or last + 1 == len(states):
        return None
    return states[last + 1]["step"], len(log.steps)


def _told_once(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Leaves out what became of an action once more, on another model, without a measurement."""
    told: dict[Any, Trial] = {}
    for trial in trials:
        told.setdefault((trial.action, trial.value, trial.outcome, trial.reason, trial.measured), trial)
    return tuple(told.values())


def _left(diagnoses: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    last = diagnoses[-1] if diagnoses else {}
    return tuple(last["rules"]) if last.get("in_force") else None


@dataclass(slots=True)
class _Held:
    """What is kept, and what was measured of all that is; see `Tuning`. What has nothing left to work on
    counts as kept; what is measured afterwards is not of all."""

    kept: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    undone: str = ""
    confirmation: Measured | None = None
    earlier: Measured | None = None
    num_earlier: int = 0
    rechecks: list[Measured] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    kept_any: bool = False
    """Whether anything was kept, be it for a while."""

    def add(self, action: str) -> None:
        """Another one is kept than those that were measured."""
        if self.confirmation is not None:
            self.earlier, self.num_earlier = self.confirmation, len(self.kept)
        self.kept.append(action)
        self.kept_any = True
        self.confirmation = None
        self.rechecks.clear()

    def drop(self, action: str, reason: str) -> None:
        """One of those is gone that were measured."""
        self.dropped[action] = reason
        self.kept = [name for name in self.kept if name != action]
        self.confirmation = self.earlier = None
        self.num_earlier = 0
        self.rechecks.clear()

    def confirm(self, measured: Measured) -> None:
        """All that is kept was measured together."""
        self.confirmation, self.earlier, self.num_earlier = measured, None, 0


def _held(log: RankLog) -> _Held:
    """Follows what was kept and lost, in order: what is lost may be kept again later."""
    held = _Held()
    for _, _, kind, detail in log.events:
        if kind == "trial" and detail["outcome"] == Outcome.KEPT.value:
            if held.undone:
                held.dropped.update(dict.fromkeys(held.kept, held.undone))
                held.kept, held.undone, held.confirmation = [], "", None
                held.over.clear()
            if detail["action"] in held.over:  # it is put on what is trained next
                held.over.remove(detail["action"])
                continue
            held.dropped.pop(detail["action"], None)
            held.add(detail["action"])
        elif kind == "dropped":
            held.drop(detail["action"], detail["reason"])
        elif kind == "over":
            held.over.add(detail["action"])
        elif kind == "undone":
            held.undone = detail["reason"]
        elif kind == "confirmation" and not held.over:
            held.confirm(Measured(**detail))
        elif kind == "recheck" and not held.over:
            held.rechecks.append(Measured(**detail))
    return held
