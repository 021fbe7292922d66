"""Ranges of steps that a reader zooms into, or a link leads to: read by a thread, and kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from time import monotonic

from diagnose.dashboards._live import Live
from diagnose.dashboards._snapshot import Snapshot, Steps

MAX_KEPT = 8
"""Ranges that are kept; each is as much as a chart shows."""

READ_SHARE = 0.05
"""A range that grows is read again so seldom that it takes this part of one CPU."""

Range = tuple[str, str, int, int]
"""A run, when it was started, the first step, and the first that is not wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """A range as far as it was there.

    Attributes:
        steps: What was read.
        end: Steps that there were.
        analysed_steps: Of the snapshot; with a new analysis gaps divide otherwise.
        read_at: When it was read, by the monotonic clock.
        took_s: What that took.
    """

    steps: Steps
    end: int
    analysed_steps: int
    read_at: float
    took_s: float

    def is_old(self, snap: Snapshot, last: int) -> bool:
        """Whether there is more to read by now, and it is time to."""
        grown = self.end < min(last, snap.num_steps) or self.analysed_steps != snap.analysed_steps
        began_anew = snap.num_steps < self.end  # the ranks were started again
        return (grown or began_anew) and monotonic() - self.read_at > self.took_s / READ_SHARE


class Ranges:
    """Reads the range that was asked for last, while callbacks go on."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._kept: OrderedDict[Range, RangeRead] = OrderedDict()
        self._next: tuple[Range, Live, Snapshot] | None = None
        self._thread: threading.Thread | None = None

    def steps(self, live: Live, snap: Snapshot, first: int, last: int, wait_s: float) -> tuple[Steps, bool]:
        """Returns the steps of a range, and whether they have been read: until then what the overview has.

        Args:
            live: The run.
            snap: What is known of it.
            first: The first step.
            last: The first that is not wanted.
            wait_s: For so long to wait where nothing was read of it.
        """
        asked = (snap.id, snap.started, first, last)
        with self._news:
            known = self._kept.get(asked)
            if known is None or known.is_old(snap, last):
                self._next = (asked, live, snap)
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name="dashboard-range", daemon=True)
                    self._thread.start()
            if known is None:
                self._news.wait_for(lambda: asked in self._kept, wait_s)
                known = self._kept.get(asked)
            if known is None:
                return cropped(snap.overview, first, last), False
            self._kept.move_to_end(asked)
            return known.steps, True

    def _run(self) -> None:
        while True:
            with self._news:
                following, self._next = self._next, None
                if following is None:
                    self._thread = None
                    return
            asked, live, snap = following
            begun = monotonic()
            steps = live.steps(*asked[2:])
            read = RangeRead(
                steps=steps,
                end=snap.num_steps,
                analysed_steps=snap.analysed_steps,
                read_at=monotonic(),
                took_s=monotonic() - begun,
            )
            with self._news:
                self._kept[asked] = read
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
                self._news.notify_all()


def cropped(steps: Steps, first: int, last: int) -> Steps:
    """Returns the bins that hold any step from `first` to before `last`."""
    begin = min(max(0, (first - steps.first) // steps.width), len(steps))
    end = min(max(begin, -((steps.first - last) // steps.width)), len(steps))
    part = slice(begin, end)
    return replace(
        steps,
        first=steps.first + begin * steps.width,
        counts=steps.counts[part],
        step_ms=steps.step_ms[part],
        phase_ms={phase: values[part] for phase, values in steps.phase_ms.items()},
        samples_per_s=steps.samples_per_s[part],
    )
