"""Whether a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(str, Enum):
    """What is known of a run's processes."""

    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How a run stood at one instant.

    Attributes:
        state: `GONE` is a run that was not closed and whose process is no more; `CANNOT_TELL` one that was
            not closed and whose process, on another machine, cannot be asked.
        host: The machine that it runs on.
        pid: The process that trains, or the one that waits for it; `None` when unknown.
        last_record_s: Seconds since the last record; `None` when there is none.
    """

    state: State
    host: str = ""
    pid: int | None = None
    last_record_s: float | None = None
