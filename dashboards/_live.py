"""One run, followed by a thread: files to a snapshot that callbacks read without waiting.

The thread tails the files of all ranks once a second, as long as somebody looks: the first rank's each
time, the others' in turn where they are too many. The newest steps come first; the history is filled in
behind, a piece at a time. What the rules say comes from the analyst's process, seldom.

Nothing is locked: the thread alone changes what it reads into, and what callbacks take is replaced whole.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from time import monotonic

from diagnose.dashboards._analyst import Analysis, Analyst, Answer
from diagnose.dashboards._composed import composed, doing
from diagnose.dashboards._device_steps import bins_by_device
from diagnose.dashboards._followed import Followed
from diagnose.dashboards._ranges import bins_between
from diagnose.dashboards._series import GapParts, steps_of
from diagnose.dashboards._snapshot import Snapshot, Steps
from diagnose.dashboards._tailing import RankTail
from diagnose.dashboards._throughput import of_bins

from diagnose.analysis.beside import ANALYSE_SHARE
from diagnose.core.liveness import Liveness, State
from diagnose.store.liveness import liveness
from diagnose.store.runs import read_lost, read_manifest

POLL_S = 1.0
FILL_S = 0.05
"""So long the thread fills history in before it looks at what is new again, and lets callbacks run."""

PUBLISH_SHARE = 0.25
"""Of the time, while there is history to read: of a thousand ranks a snapshot takes as long to make as a
hundred of them to read."""

UNWATCHED_S = 15.0
"""A run that nobody has looked at for so long is not read until somebody looks again."""

LIVENESS_EVERY_S = 2.0
"""Asking the process table of every rank whether a run goes on takes longer than a look at its file."""

ANALYSE_EVERY_S = 10.0
ANALYSE_GROWTH = 1.25
"""A running job is analysed so seldom, and only when it has so many times the steps: findings of a long
run change slowly."""

FIRST_STEPS = 20
"""The rules give no verdict on fewer measured steps; a run that goes on is not analysed before."""

FIRST_LOOK_S = 0.3
SETTLED_S = 3.0
"""So long after a run was over its pages have all been drawn for the last time."""

logger = logging.getLogger(__name__)


class Live:
    """One run.

    Args:
        folder: Its folder.
        analyst: Asks the rules.
    """

    def __init__(self, folder: Path, analyst: Analyst) -> None:
        self.folder = folder
        self._analyst = analyst
        self._ranks = Followed(folder)
        self._manifest = read_manifest(folder)
        self._liveness = Liveness(state=State.CANNOT_TELL)
        self._liveness_at = -LIVENESS_EVERY_S
        self._attempt = ""
        self._analysis: Analysis | None = None
        self._analysis_words = ""
        self._analysing = False
        self._analysed_steps = 0
        self._analysed_at = -1e9
        self._analysed_state = ""
        self._new_analysis = False
        self._unpublished = True
        self._published_at = -1e9
        self._publish_took_s = 0.0
        self._over_at: float | None = None
        self._snapshot = Snapshot(version=0, id=folder.name, liveness=self._liveness, words="being read")
        self._looked = threading.Event()
        self._looked_at = monotonic()
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard-reader", daemon=True)
        self._thread.start()

    # -- for callbacks

    def snapshot(self, first_look_s: float = FIRST_LOOK_S) -> Snapshot:
        """Returns what is known. Waits for the first look at a run, and for nothing afterwards.

        Args:
            first_look_s: For so long at most.
        """
        slept = monotonic() - self._looked_at > UNWATCHED_S
        self._looked_at = monotonic()
        if slept:
            self._ready.clear()
        self._looked.set()
        self._ready.wait(first_look_s)
        return self._snapshot

    def steps(self, first: int, last: int) -> Steps:
        """Returns the steps from `first` to before `last`, read for this call."""
        tails, parts = self._trained()
        if not tails:
            return Steps()
        drawn = self._snapshot
        if first <= 0 and last >= drawn.num_steps and drawn.filled_share == 1.0:
            return drawn.overview
        bins = bins_between([tail.path for tail in tails], first, min(last, tails[0].num_steps))
        if drawn.device_share is not None:
            with contextlib.suppress(sqlite3.DatabaseError, ValueError, OSError):
                bins[0] = bins_by_device(tails[0].path, bins[0], first, min(last, tails[0].num_steps))
        return steps_of(bins[0], of_bins(bins), parts[0])

    @property
    def is_settled(self) -> bool:
        """Whether the run is over, and has been so long enough that every page shows its end."""
        return self._over_at is not None and monotonic() - self._over_at > SETTLED_S

    @property
    def idle_s(self) -> float:
        """Seconds since somebody looked."""
        return monotonic() - self._looked_at

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._looked.set()
        self._thread.join(timeout=5)

    # -- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                unread = self._turn()
            except Exception:  # a fault of ours must not end the following
                logger.exception("reading %s failed", self.folder)
                unread = False
            self._ready.set()
            if unread:
                self._closed.wait(FILL_S)  # half of the time is the callbacks' and the browser's
            elif monotonic() - self._looked_at > UNWATCHED_S:
                self._looked.clear()
                if monotonic() - self._looked_at > UNWATCHED_S:
                    self._looked.wait()
            else:
                self._closed.wait(POLL_S)

    def _turn(self) -> bool:
        """Reads what is new and a piece of the history, and publishes; says whether there is more."""
        self._unpublished |= self._ranks.find() | self._ranks.ask() | self._ask_whether_it_runs()
        attempt = self._ranks.tails[0].path.name if self._ranks.tails else ""
        if attempt != self._attempt:
            self._attempt = attempt
            self._forget_analysis()  # it is of ranks that have died, and were started again
        if not self._ready.is_set():
            self._publish()  # the newest steps, before the rest is read
            self._ready.set()
        begun = monotonic()
        while monotonic() - begun < FILL_S and not self._closed.is_set() and self._ranks.fill():
            self._unpublished = True
        if self._new_analysis:
            self._new_analysis, self._unpublished = False, True
        self._unpublished |= self._analyse_if_due()
        more = self._ranks.is_behind
        since_s = monotonic() - self._published_at
        if self._unpublished and not (more and since_s * PUBLISH_SHARE < self._publish_took_s):
            self._publish()
        return more

    def _ask_whether_it_runs(self) -> bool:
        if monotonic() - self._liveness_at < LIVENESS_EVERY_S:
            return False
        self._liveness_at = monotonic()
        before = (self._liveness.state, self._manifest)
        self._manifest = read_manifest(self.folder) or self._manifest
        began = before[1].get("started_unix")
        if began is not None and began != self._manifest.get("started_unix"):
            self._forget()
        ranks = self._ranks
        self._liveness = liveness(
            self.folder, None if ranks.has_others else [tail.meta for tail in ranks.tails]
        )
        if self._liveness.state is not before[0]:
            ranks.ask_all_again()
        # What the last record is ago moves on as long as another may come, also where nobody can ask.
        may_go_on = self._liveness.state in (State.RUNNING, State.CANNOT_TELL)
        return before != (self._liveness.state, self._manifest) or may_go_on

    def _forget(self) -> None:
        """The run was deleted, and recorded again under its name: nothing holds of what was read before."""
        self._ranks = Followed(self.folder)
        self._forget_analysis()
        self._ranks.find()
        self._ranks.ask()

    def _forget_analysis(self) -> None:
        self._analysis, self._analysis_words, self._analysing = None, "", False
        self._analysed_steps, self._analysed_at, self._analysed_state = 0, -1e9, ""

    def _trained(self) -> tuple[list[RankTail], list[GapParts]]:
        """Returns the ranks that have steps, in order, and how the gaps of each divide."""
        tails = self._ranks.trained
        parts: dict[str, GapParts] = dict(self._analysis.parts) if self._analysis is not None else {}
        first: GapParts = next(iter(parts.values()), {})
        return tails, [parts.get(tail.path.name, first) for tail in tails]

    # -- the analysis

    def _analyse_if_due(self) -> bool:
        steps = sum(tail.num_steps for tail in self._ranks.tails)
        lost = read_lost(self.folder)
        state = f"{self._liveness.state}/{doing(self._ranks.tails)}/{lost}"
        since_s = monotonic() - self._analysed_at
        if self._analysing or not self._ranks.all_asked:
            return False
        now = self._liveness.state
        grown = steps != self._analysed_steps
        if now is State.RUNNING:
            grown = steps >= max(self._analysed_steps * ANALYSE_GROWTH, FIRST_STEPS)
        if not (grown or state != self._analysed_state):
            return False
        longest = self._analysis.took_s / ANALYSE_SHARE if self._analysis is not None else 0.0
        may_go_on = now in (State.RUNNING, State.CANNOT_TELL)
        if may_go_on and since_s <= max(ANALYSE_EVERY_S, longest):
            return False
        self._analysing = True
        self._analysis_words = "being analysed"
        self._analysed_state = state

        asked_of = self._ranks, self._attempt

        def told(answer: Answer) -> None:
            if asked_of != (self._ranks, self._attempt):
                return  # of a run, or of ranks, that are no more
            if isinstance(answer, Analysis):
                self._analysis, self._analysis_words = answer, ""
            else:
                self._analysis_words = str(answer)
            self._analysed_steps, self._analysed_at = steps, monotonic()
            self._analysing, self._new_analysis = False, True

        self._analyst.analyse(self.folder, told)
        return True

    # -- publishing

    def _publish(self) -> None:
        begun = monotonic()
        tails = self._ranks.tails
        trained, parts = self._trained()
        total = sum(tail.num_steps for tail in tails)
        unread = sum(tail.unread_steps for tail in tails)
        over = (
            self._liveness.state in (State.ENDED, State.GONE)
            and not self._ranks.is_behind
            and not self._analysing
            and self._analysed_steps == total
        )
        self._over_at = (self._over_at or monotonic()) if over else None
        drawn = composed(
            self._snapshot.version + 1,
            self.folder,
            self._manifest,
            self._liveness,
            tails,
            dict(zip((tail.path.name for tail in trained), parts, strict=True)),
            self._ranks.met,
        )
        self._snapshot = replace(
            drawn,
            over=over,
            filled_share=(total - unread) / total if total else 1.0,
            profile=self._analysis.profile if self._analysis is not None else None,
            analysed_steps=self._analysed_steps,
            left_out=self._analysis.left_out if self._analysis is not None else "",
            analysis=self._analysis_words,
        )
        self._unpublished = False
        self._published_at = monotonic()
        self._publish_took_s = self._published_at - begun
