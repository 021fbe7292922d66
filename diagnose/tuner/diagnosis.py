"""Asks the rules about a run in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from diagnose.core.finding import Finding
from diagnose.core.units import NS_PER_S
from diagnose.tuner.policy import Lead
from diagnose.tuner.question import Question


class Diagnosis(Protocol):
    """A diagnosis under way."""

    @property
    def cost_ns(self) -> float:
        """The CPU time that it took, known when it has been made."""

    def leads(self) -> list[Lead] | None:
        """Returns what was found, or `None` while it is not known yet."""

    def close(self) -> None:
        """Gives it up."""


class OtherProcess:
    """A diagnosis made by another process from the run's folder.

    Args:
        folder: The run's folder.
        first_step: The first step to look at: what was before another change is past.

    Raises:
        OSError: If no process could be started.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._question = Question(__name__, str(folder.absolute()), str(first_step))

    @property
    def cost_ns(self) -> float:
        return self._question.cpu_s * NS_PER_S

    def leads(self) -> list[Lead] | None:
        found = self._question.answer()
        return found and [Lead.from_record(each) for each in found]

    def close(self) -> None:
        self._question.close()


def leads_as_json(findings: Sequence[Finding], step_time_ns: float) -> list[dict[str, Any]]:
    """Returns the findings that name actions, as `OtherProcess` reads them."""
    return [
        {
            "rule": finding.rule,
            "actions": list(finding.actions),
            "gain": asdict(finding.gain(step_time_ns)),
            "gains": {name: asdict(finding.gain(step_time_ns, name)) for name in finding.won_ns},
        }
        for finding in findings
        if finding.actions
    ]


def answer(folder: str, first_step: str) -> list[dict[str, Any]]:
    """Returns what the rules find in the steps of a run from `first_step` on; see `Question`."""
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed

    profile = diagnosed(load_profile(Path(folder), first_step=int(first_step), alone=True))
    return leads_as_json(profile.findings, profile.step_time_ns)
