"""One deep window under way: what was asked for, how far it has come, and what it has learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from diagnose.core.deep_window import KIND
from diagnose.launch.deep_window_profiler import Profiler

if TYPE_CHECKING:
    from diagnose.hooks._recorder import Recorder
    from diagnose.launch.deep_window_count import Counting

DEFAULT_STEPS = 3
"""Recorded steps. Memory and the time to write grow with each; three show what repeats."""

LONGEST_NS, LONGEST_STEPS = 5_000_000_000, 8
"""A window ends after so long, and so many usual steps for each of its own: an evaluation has begun inside
it, or the training has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A window to take.

    Attributes:
        first_step: The first step to record, from 0, if it is not past.
        num_steps: Steps to record.
        by: Who asked: `option`, `command`, or the names of rules.
    """

    first_step: int
    num_steps: int = DEFAULT_STEPS
    by: str = "option"

    def answer(self, recorder: Recorder, problem: str) -> None:
        """Tells who gave the command what became of it; nobody, where none was given."""
        if self.by == "command":
            state = "refused" if problem else "done"
            recorder.event("command", command=KIND, argument="", state=state, reason=problem)


def asked_of(text: str) -> Asked:
    """Returns the window of `STEP` or `STEP:COUNT`, as `launch.settings` has checked it."""
    step, _, count = text.partition(":")
    return Asked(first_step=int(step), num_steps=int(count) if count else DEFAULT_STEPS)


class Window:
    """A window that has begun. Of the training thread, but for `is_overdue`.

    Args:
        asked: What was asked for.
        step: The step in which operations are counted, the first that no figure contains.
        asides: The recorder's count of them.
        usual_ns: What the step before took.
        device: Number of the CUDA device that the model is on; `None` without one.

    Attributes:
        recording: Whether the profiler records; before, the operations are counted.
        num_steps: Steps to record.
        first_step: The first recorded step.
        seen_step: The step that began last, at `seen_ns`.
        begun_ns: When all was ready and the counting began; 0 until then.
        began_ns: When recording began.
        counted: What was counted; `None` until then, and where it could not be. Likewise `num_operations`.
        is_told: Whether the main thread has been told to end it; the flusher's thread tells it.
        pending: What it was told to call; kept alive here.
    """

    def __init__(
        self, *, asked: Asked, step: int, asides: int, usual_ns: int, device: int | None = None
    ) -> None:
        self.asked = asked
        self.step = step
        self.num_steps = asked.num_steps
        self.first_step = self.seen_step = step + 1
        self.recording = False
        self.profiler = Profiler(device)
        self.begun_ns = self.began_ns = self.seen_ns = 0
        self.start_ns = self.stop_ns = 0
        self.why_not_counted = ""
        self.counted: dict[str, Any] | None = None
        self.num_operations = 0
        self.is_told = False
        self.pending: Callable[..., Any] | None = None
        self._longest_ns = max(LONGEST_NS, LONGEST_STEPS * (1 + asked.num_steps) * usual_ns)
        self._asides = asides
        self._mode: Counting | None = None

    def is_overdue(self) -> bool:
        """Whether it should have ended long ago, and nobody has been told."""
        begun_ns = self.begun_ns
        return begun_ns > 0 and perf_counter_ns() - begun_ns > self._longest_ns and not self.is_told

    def seen(self, step: int, now_ns: int) -> None:
        """A step has ended: the one before `step`."""
        self.seen_step, self.seen_ns = step, now_ns

    def count(self, recorder: Recorder) -> None:
        """Begins to count the operations of the step."""
        from diagnose.analysis.trace_classes import work_of
        from diagnose.core.ledger import SLOT_OF
        from diagnose.launch.deep_window_count import Counting

        optimizer = SLOT_OF["optimizer"]
        self._mode = Counting(lambda: recorder.current == optimizer, work_of)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop_counting(self, asides: int) -> bool:
        """Takes the mode off; says whether it could."""
        mode = self._mode
        if mode is None:
            return True
        mode.on = False
        if not mode.leave():
            return False
        self._mode = None
        if mode.broken:
            self.why_not_counted = mode.broken
        elif asides != self._asides:
            self.why_not_counted = "that step evaluated, saved or compiled"
        else:
            self.counted, self.num_operations = mode.as_json(), mode.num_operations
        return True

    def as_json(self) -> dict[str, Any]:
        """Returns what is known of it, in the form of `core.deep_window.DeepWindow`."""
        return {
            "asked_by": self.asked.by,
            "first_step": self.first_step,
            "num_steps": self.seen_step - self.first_step,
            "start_ns": self.start_ns,
            "stop_ns": self.stop_ns,
            "wall_ns": self.seen_ns - self.began_ns,
            "why_not_counted": self.why_not_counted,
            "counted": self.counted,
        }
