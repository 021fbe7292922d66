"""The ranks of a run, followed: those asked what is new that there is time for, the others in turn.

One thread alone does this. What others may look at is `tails`, which is replaced whole.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from time import monotonic

from diagnose.dashboards._marks import EVENTS
from diagnose.dashboards._tailing import RankTail
from diagnose.dashboards._waits import LateBins, RankWaits

from diagnose.store.runs import number_of, rank_files

ASK_S = 0.1
"""So long ranks are asked at a time, the first rank always. Of a thousand each has its turn in ten seconds
or so."""


class Followed:
    """The ranks of one run.

    Args:
        folder: The run's folder.

    Attributes:
        tails: Their readers, in the order of ranks.
        met: What they wait for each other in the same steps, where that is measured.
        has_others: Whether ranks had further processes, whose files are not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tails: tuple[RankTail, ...] = ()
        self.met: LateBins | None = None
        self.has_others = False
        self._turns: deque[RankTail] = deque()  # all but the first; the next to be asked is at the left
        self._unasked: set[RankTail] = set()
        self._compared: list[RankTail] = []

    @property
    def trained(self) -> list[RankTail]:
        """The ranks that have steps."""
        return [tail for tail in self.tails if tail.num_steps]

    @property
    def all_asked(self) -> bool:
        """Whether each rank has told what there was when it was found, or when the run had ended."""
        return not self._unasked

    @property
    def is_behind(self) -> bool:
        """Whether there is something to read that was there before."""
        return bool(self._unasked or self._unread())

    def find(self) -> bool:
        """Looks for new files; says whether there were any."""
        paths = rank_files(self.folder)
        self.has_others = any(path.name.count(".") > 1 for path in paths)
        gone = {tail.path for tail in self.tails}.difference(paths)  # of an attempt before a restart
        known = {tail.path: tail for tail in self.tails if tail.path not in gone}
        new = [path for path in paths if path not in known and path.name.count(".") == 1]
        if not new:
            return False
        ordered = sorted((*known, *new), key=lambda path: (number_of(path), path.name))
        if self.tails and ordered[0] != self.tails[0].path:
            # Of the first alone everything is read, which it is no longer.
            known.pop(self.tails[0].path, None)
        self.tails = tuple(
            known.get(path) or RankTail(path, EVENTS, first=path == ordered[0]) for path in ordered
        )
        found = [tail for tail in self.tails if tail.path not in known]
        left = set(self.tails[1:])
        self._turns = deque(tail for tail in (*found, *self._turns) if tail in left)
        self._unasked = (self._unasked | set(found)) & set(self.tails)
        return True

    def ask(self) -> bool:
        """Reads what is new of the first rank, and of others as long as there is time; says whether there
        was anything."""
        if not self.tails:
            return False
        begun = monotonic()
        # Where the first file cannot be read, the first that can be is what is drawn.
        first = next(iter(self.trained), self.tails[0])
        told = False
        for tail in {self.tails[0]: None, first: None}:
            told |= self._ask(tail, first)
        for _ in range(len(self._turns)):
            told |= self._ask(self._turns[0], first)
            self._turns.rotate(-1)
            if monotonic() - begun > ASK_S:
                break
        self._compare()
        return told

    def ask_all_again(self) -> None:
        """The run has ended: there is nothing more to read once each rank has been asked from now on."""
        self._unasked.update(self.tails)

    def fill(self) -> bool:
        """Reads a piece of the history; says whether there was any."""
        unread = self._unread()
        if not unread:
            return False
        # The first rank's steps are what is drawn; of the others those of which most is missing.
        first = self.tails[0]
        max(unread, key=lambda tail: (tail is first, tail.unread_steps, tail.unread_waits)).fill()
        self._compare()
        return True

    def _ask(self, tail: RankTail, first: RankTail) -> bool:
        told = tail.poll()
        tail.asked_at = first.num_steps
        tail.behind_steps = max(0, first.num_steps - tail.num_steps)
        if not tail.has_more:
            self._unasked.discard(tail)
        return told

    def _unread(self) -> list[RankTail]:
        # What ranks wait is compared among all of them: it is read once all are known.
        known = self.all_asked
        return [tail for tail in self.tails if tail.unread_steps or (known and tail.unread_waits)]

    def _compare(self) -> None:
        """Compares what the ranks wait in the steps that all have told of by now."""
        if not self.all_asked:
            return
        trained = self.trained
        if trained != self._compared:  # all have to be asked again from the first step on
            for tail in trained:
                tail.waits = RankWaits(any=tail.waits.any)
            self._compared = trained
            distinct = len({tail.number for tail in trained}) == len(trained) > 1
            self.met = LateBins(len(trained)) if distinct else None
        elif self.met is not None and all(tail.waits.any for tail in trained):
            self.met.compare([tail.waits for tail in trained])
