"""What pages read: the runs under one folder, each followed once, whoever looks at it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from diagnose.dashboards._analyst import Analyst, Compared
from diagnose.dashboards._comparisons import Comparisons
from diagnose.dashboards._listed import RunRow
from diagnose.dashboards._live import SETTLED_S, Live
from diagnose.dashboards._run_list import RunList
from diagnose.dashboards._snapshot import Snapshot, Steps
from diagnose.dashboards._zoomed import Ranges

from diagnose.core.command import Command
from diagnose.core.errors import DiagnoseError
from diagnose.launch.control import send
from diagnose.store.runs import NAME, rank_files
from diagnose.store.tail import look

MAX_LIVE = 8
"""Runs that are followed at once; the one that nobody has looked at for the longest is let go."""

COMMAND_WAITS_S = 10.0
"""Whoever gives a command as the first thing is told of the run, not that nothing is known of it yet."""

KEPT_RANKS = 8
"""The ranks run the same script: of so many, the first has its text that any has."""

MAX_TEXT_BYTES = 2_000_000
"""A source file that is longer is not shown: nobody wrote it."""


class Source:
    """The runs under one folder.

    Args:
        root: The folder.
        trusted: Whether the request at hand may control a job.

    Attributes:
        root: Likewise.
    """

    def __init__(self, root: Path, *, trusted: Callable[[], bool] = lambda: False) -> None:
        self.root = root
        self._trusted = trusted
        self._analyst = Analyst()
        self._lock = threading.Lock()
        self._live: OrderedDict[str, Live] = OrderedDict()
        self._list = RunList(root, self._analyst)
        self._ranges = Ranges()
        self._comparisons = Comparisons(self._analyst)
        self._expected_until: dict[str, float] = {}

    def folder(self, run: str) -> Path:
        """Returns the folder of a listed run.

        Raises:
            DiagnoseError: If there is none of this name.
        """
        folder = self.root / run
        # A link out of the folder, or a name like `..`, leads to no run of ours.
        known = NAME.fullmatch(run) is not None and (folder / "run.json").is_file()
        if not known or folder.resolve().parent != self.root.resolve():
            raise DiagnoseError(f"There is no run {run[:128]!r} under {self.root}.")
        return folder

    def run(self, run: str) -> Live:
        """Returns the follower of a run.

        Raises:
            DiagnoseError: If there is no such run.
        """
        folder = self.folder(run)
        dropped: list[Live] = []
        with self._lock:
            live = self._live.get(run)
            if live is None:
                live = self._live[run] = Live(folder, self._analyst)
                while len(self._live) > MAX_LIVE:
                    oldest = max(self._live, key=lambda name: self._live[name].idle_s)
                    dropped.append(self._live.pop(oldest))
        for each in dropped:
            threading.Thread(target=each.close, daemon=True).start()
        return live

    def steps(self, snap: Snapshot, first: int, last: int, wait_s: float) -> Steps:
        """Returns steps of a run, from `first` to before `last`; see `Ranges`."""
        steps, is_read = self._ranges.steps(self.run(snap.id), snap, first, last, wait_s)
        if not is_read:
            self.expect(snap.id)
        return steps

    def expect(self, run: str) -> None:
        """Says that a page lacks something that will be there soon: its clock goes on, also when the run is
        over."""
        self._expected_until[run] = monotonic() + SETTLED_S

    def is_settled(self, run: str) -> bool:
        """Whether the pages of a run will not change any more."""
        live = self._live.get(run)
        expected = monotonic() < self._expected_until.get(run, 0.0)
        return live is not None and live.is_settled and not expected

    def watched(self, within_s: float) -> list[Live]:
        """Returns the runs that a page has asked for in so many seconds, and that go on changing."""
        with self._lock:
            lives = list(self._live.values())
        return [live for live in lives if live.idle_s < within_s and not live.is_settled]

    @property
    def has_listed(self) -> bool:
        """Whether the runs have been listed once: before, that there are none means nothing."""
        return self._list.has_listed

    def runs(self) -> tuple[RunRow, ...]:
        """Returns the runs, the newest first, as they were at most a second ago."""
        return self._list.rows()

    def compared(self, before: str, after: str) -> Compared | None:
        """Returns two runs compared; `None` while that is being done for the first time: ask again.

        Raises:
            DiagnoseError: If there is no such run, or they cannot be compared.
        """
        answer = self._comparisons.of(self.folder(before), self.folder(after))
        if isinstance(answer, str):
            raise DiagnoseError(answer)
        assert answer is None or isinstance(answer, Compared)
        return answer

    def source_lines(self, run: str, file: str, line: int, around: int = 3) -> tuple[tuple[int, str], ...]:
        """Returns the lines around one that the run's analysis names, with their numbers, as they were when
        they ran: the file may have been edited since.

        A file that the analysis does not name is not read, whatever the address says.
        """
        live = self._live.get(run)
        profile = live.snapshot().profile if live is not None else None
        if profile is None:
            return ()
        named = {finding.file for finding in profile.findings} | {each.file for each in profile.where}
        if file not in named or not Path(file).is_absolute():
            return ()
        kept = _kept_text(self.folder(run), file)
        text = _text_now(Path(file)) if kept is None else kept
        # Not `splitlines`, which ends a line at a form feed.
        lines = text.removesuffix("\n").split("\n") if text else []
        first, last = max(1, line - around), min(len(lines), line + around)
        return tuple((number, lines[number - 1]) for number in range(first, last + 1))

    def command(self, run: str, kind: str, argument: str = "") -> str:
        """Hands a command to the running job; what the job did with it comes as a mark of the run.

        Returns:
            Whether it was handed over, or why not, in words.

        Raises:
            DiagnoseError: If there is no such run.
        """
        folder = self.folder(run)
        if not self._trusted():
            return "Commands need the token: open the address that the terminal printed."
        refuses = self.run(run).snapshot(COMMAND_WAITS_S).refuses
        if refuses:
            return refuses
        try:
            send(folder, Command(command=kind, argument=argument))
        except ValueError as error:
            return f"{error}."
        except OSError as error:
            return f"The command could not be handed over: {error.strerror}."
        return "Handed over; the job answers at the end of a step."

    def close(self) -> None:
        """Ends everything that follows a run."""
        with self._lock:
            live, self._live = list(self._live.values()), OrderedDict()
        for each in live:
            each.close()
        self._list.close()
        self._analyst.close()


def _kept_text(folder: Path, file: str) -> str | None:
    """Returns the text that a run has kept of a source file; `None` if it has kept none."""
    for path in rank_files(folder)[:KEPT_RANKS]:
        with contextlib.suppress(sqlite3.DatabaseError, ValueError), look(path) as rank:
            text = rank.source(file)
            if text is not None:
                return text
    return None


def _text_now(path: Path) -> str:
    """Returns the text of a source file as it is now; nothing where it cannot be read."""
    try:
        if path.is_file() and path.stat().st_size <= MAX_TEXT_BYTES:
            return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass
    return ""
