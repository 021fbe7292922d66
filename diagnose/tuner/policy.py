"""What may be tried, and what to try next."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from diagnose.actions.base import Action
from diagnose.core.finding import Gain
from diagnose.core.trial import ASKED_FOR, Safety

WORTH_SPEEDUP = 1.02
"""Less than this is not worth a trial: the test would need hundreds of steps to see it."""

REPLACES_SPEEDUP = 1.10
"""What is kept makes way for an action that excludes it only where that is expected to win so much more: in
the trial the job does without both for a while."""

IN_TURN = 60
"""Actions of this order and above, which are for memory and compilation, change what the ones below are
measured on, so they wait for them. All others go by what they are expected to win: each trial takes steps,
and what no finding asks for must not keep those that are to win half of the step from being tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """A finding that names actions.

    Attributes:
        rule: The rule that found it.
        actions: The actions that help, the best first.
        gain: What its end would win; `None` where no rule says, and the trial must show.
        gains: What an action is expected to win, where that is less.
        in_force: Names of the kept actions beyond which all that is to be won.
    """

    rule: str
    actions: tuple[str, ...]
    gain: Gain | None
    gains: Mapping[str, Gain] = field(default_factory=dict)
    in_force: tuple[str, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any], in_force: Sequence[str] = ()) -> Lead:
        """Returns the lead that `asdict` made, or JSON brought from another process."""
        return cls(
            rule=record["rule"],
            actions=tuple(record["actions"]),
            gain=Gain(**record["gain"]) if record["gain"] else None,
            gains={name: Gain(**gain) for name, gain in record["gains"].items()},
            in_force=tuple(in_force),
        )

    @property
    def speedup(self) -> float:
        """What is expected; 1 where nothing is."""
        return self.gain.speedup if self.gain else 1.0

    def of(self, action: str) -> Lead:
        """Returns what it means for one action."""
        return replace(self, gain=self.gains.get(action, self.gain))

    def beyond(self, kept: str, speedup: float) -> Lead:
        """Returns what is left to win of it, for one action, where another has won so much in its place."""
        gain = self.gain and Gain(**{end: value / speedup for end, value in asdict(self.gain).items()})
        return replace(self, gain=gain, in_force=(*self.in_force, kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An action to try.

    Attributes:
        name: Its name.
        action: The action.
        lead: What led to it.
        asked: Whether a finding or the user names it: then a refusal is worth telling.
        instead: Names of the kept actions in whose place it would be.
    """

    name: str
    action: Action
    lead: Lead
    asked: bool = True
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user allows.

    Attributes:
        allowed: Beyond what is exact or only rounds differently.
        only: Names of the only actions to try; empty means all.
        skip: Names of actions not to try.
        dry_run: Predict, and change nothing.
        forbidden: Classes that the user took back while the job ran.
    """

    allowed: frozenset[Safety] = frozenset()
    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()
    dry_run: bool = False
    forbidden: frozenset[Safety] = frozenset()

    def wanted(self, name: str) -> bool:
        """Whether the user wants the action to be thought of at all."""
        return name not in self.skip and (not self.only or name in self.only)

    def allows(self, safety: Safety) -> bool:
        """Whether an action of this safety may be tried."""
        if safety in self.forbidden:
            return False
        return safety not in ASKED_FOR or safety in self.allowed

    def may_harm(self) -> bool:
        """Whether something that changes what training computes may come to be in force."""
        return not self.dry_run and any(map(self.allows, ASKED_FOR))


def excluded_by(name: str, others: Collection[str], actions: Mapping[str, Action]) -> list[str]:
    """Returns which of others cannot be in force together with an action."""
    return [other for other in others if name in actions[other].excludes or other in actions[name].excludes]


def candidates(
    leads: Sequence[Lead],
    actions: Mapping[str, Action],
    policy: Policy,
    done: Collection[str],
    in_force: Collection[str],
) -> list[Candidate]:
    """Returns what to try, the next first.

    Greedy by what is expected to be won, and of what no finding asks for nobody expects anything: what the
    user names, and what only a trial can tell. Actions of order `IN_TURN` and above wait for all others.

    Args:
        leads: What the rules found.
        actions: All actions by name.
        policy: What the user allows.
        done: Names of actions that need no (further) trial.
        in_force: Names of kept actions. What excludes them is left out unless it is to win clearly more.
    """
    found: dict[str, Candidate] = {}
    unasked = [name for name, action in actions.items() if action.unasked or name in policy.only]
    for told in [*leads, *(Lead(rule="", actions=(name,), gain=None) for name in unasked)]:
        for name in told.actions:
            action, lead = actions.get(name), told.of(name)
            if action is None or name in done or not policy.wanted(name):
                continue
            if lead.gain and lead.speedup < WORTH_SPEEDUP:
                continue
            rivals = excluded_by(name, in_force, actions)
            if rivals and not (lead.speedup >= REPLACES_SPEEDUP and set(rivals) <= set(lead.in_force)):
                continue
            if name not in found or found[name].lead.speedup < lead.speedup:
                asked = bool(lead.rule) or name in policy.only
                found[name] = Candidate(
                    name=name, action=action, lead=lead, asked=asked, instead=tuple(rivals)
                )

    def rank(candidate: Candidate) -> tuple[int, float, int]:
        order = candidate.action.order
        place = candidate.lead.actions.index(candidate.name)
        return (order if order >= IN_TURN else 0, -candidate.lead.speedup, place)

    return sorted(found.values(), key=rank)
