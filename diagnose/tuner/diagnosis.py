"""Asks the rules about a run in progress, in a process of its own: reading and judging the records takes a
second of CPU time, which the training process does not have to spare."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from diagnose.core.finding import Finding, Gain
from diagnose.tuner.policy import Lead

PACKAGE = Path(__file__).parents[2]
"""The folder that holds `diagnose`, for a child that need not find it installed."""

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from diagnose.tuner.diagnosis import main
main(*sys.argv[2:])
"""

NICENESS = 10
"""The training process goes first."""


class Diagnosis(Protocol):
    """A diagnosis under way."""

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
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        ours = ("DIAGNOSE_RUN", "DIAGNOSE_SUPERVISOR", "PYTHONPATH", "PYTHONSTARTUP")
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(PACKAGE), str(folder.absolute()), str(first_step)],
            stdin=subprocess.DEVNULL,
            stdout=self._answer,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={
                **{key: value for key, value in os.environ.items() if key not in ours},
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # One thread: numpy must not take the cores that training is measured on.
                "OMP_NUM_THREADS": "1",
            },
        )

    def leads(self) -> list[Lead] | None:
        """See `Diagnosis`. A process that failed has found nothing."""
        if self._process.poll() is None:
            return None
        self._answer.seek(0)
        try:
            found = json.loads(self._answer.read())
        except ValueError:
            found = []
        self.close()
        return [
            Lead(rule=each["rule"], actions=tuple(each["actions"]), gain=Gain(**each["gain"]))
            for each in found
        ]

    def close(self) -> None:
        """See `Diagnosis`."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._answer.close()


def leads_as_json(findings: Sequence[Finding], step_time_ns: float) -> list[dict[str, Any]]:
    """Returns the findings that name actions, as `OtherProcess` reads them."""
    return [
        {
            "rule": finding.rule,
            "actions": list(finding.actions),
            "gain": {"speedup": gain.speedup, "low": gain.low, "high": gain.high},
        }
        for finding in findings
        if finding.actions
        for gain in [finding.gain(step_time_ns)]
    ]


def main(folder: str, first_step: str) -> None:
    """Prints what the rules find in the steps of a run from `first_step` on, as JSON."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed

    profile = diagnosed(load_profile(Path(folder), first_step=int(first_step)))
    print(json.dumps(leads_as_json(profile.findings, profile.step_time_ns)))
