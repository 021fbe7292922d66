"""One look at a run, as exporters are given it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """What one rank has done since the run began; it only grows.

    Attributes:
        name: The rank's number; of a further process of the same rank, with that process's id.
        num_steps: All steps, warm-up and tuning included.
        phase_ns: Nanoseconds in each phase.
        num_events: How often something happened: `gc`, `checkpoint`, `compile`.
        resident_bytes: Memory of the process now; `None` where the system does not tell.
        step_ns: Mean time of the steps since the look before; `None` without new steps.
        samples_per_s: Samples per second of the same steps; `None` where no batch size was read.
        last_unix: When the last step ended, in seconds; `None` without steps.
    """

    name: str
    host: str
    num_steps: int
    samples: int
    tokens: int
    phase_ns: Mapping[Phase, float]
    num_events: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int | None = None
    step_ns: float | None = None
    samples_per_s: float | None = None
    last_unix: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The mean of some steps of the first rank that follow each other.

    Attributes:
        step: The last of them.
        unix: When it ended, in seconds.
        step_ms: Mean milliseconds of a step.
        phase_ms: Likewise of each phase that took time in the run so far.
        samples_per_s: `None` where no batch size was read.
        tokens_per_s: Likewise.
    """

    step: int
    unix: float
    step_ms: float
    phase_ms: Mapping[Phase, float]
    samples_per_s: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a run.

    Attributes:
        folder: The run's folder.
        profile: As it was last analysed: of a run that goes on, maybe a while ago.
        ranks: Of all of its files, the first rank's first.
        points: The first rank's steps since the look before.
        is_last: Whether the run is over.
    """

    folder: Path
    profile: Profile
    ranks: tuple[RankReading, ...] = ()
    points: tuple[Point, ...] = ()
    is_last: bool = True

    @property
    def end(self) -> tuple[int, float]:
        """The first rank's last step, and when it ended, in seconds; of a run without steps 0, and now."""
        first = self.ranks[0] if self.ranks else None
        if first is None or first.last_unix is None:
            return 0, time.time()
        return first.num_steps - 1, first.last_unix

    @property
    def has_failed(self) -> bool:
        """Whether the run is over, and did not end well; it may not have come to its first step."""
        run = self.profile.run
        return self.is_last and (
            run.error is not None or run.signal is not None or run.exit_code not in (0, None)
        )


def clean(text: str) -> str:
    """Returns a name of the user's as text that UTF-8 can hold: a file's name may be any bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def finite(value: float | None) -> float | None:
    """Returns the value if it is a number."""
    return value if value is not None and math.isfinite(value) else None
