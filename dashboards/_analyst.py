"""Asks the rules in a process of its own: an analysis takes seconds of CPU time, which callbacks lack."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, PriorityQueue
from shlex import quote
from time import monotonic
from typing import Any

from diagnose.analysis.beside import MAX_RECORDS
from diagnose.core.comparison import Comparison
from diagnose.core.errors import DiagnoseError
from diagnose.core.phases import Phase
from diagnose.core.prediction import Prediction
from diagnose.core.profile import Profile

NICENESS = 10
"""Training goes first."""

IDLE_S = 120.0
"""A process that nobody has asked for so long is ended: it holds what it has imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A run analysed.

    Attributes:
        profile: With its rules asked.
        parts: By the name of each rank's file, how its gaps divide among the phases.
        took_s: What it took.
        left_out: What it leaves out, in words; empty where that is nothing.
    """

    profile: Profile
    parts: Mapping[str, Mapping[int, Mapping[Phase, float]]]
    took_s: float = 0.0
    left_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two runs, compared as `diagnose compare` does.

    Attributes:
        comparison: Phase by phase.
        profiles: Of both, their rules asked.
        prediction: Predicted beside measured, where faults are gone.
    """

    comparison: Comparison
    profiles: tuple[Profile, Profile]
    prediction: Prediction | None


Answer = Analysis | Compared | str
"""What was asked for, or why there is none, in words for the user."""

Told = Callable[[Answer], None]


class Analyst:
    """Analyses runs one after the other, in the order of their urgency.

    The process is started when it is first needed, and ends with this one, however this one ends.
    """

    def __init__(self) -> None:
        self._asked: PriorityQueue[tuple[int, int, tuple[str, ...], Told]] = PriorityQueue()
        self._count = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: Any = None
        self._closed = threading.Event()

    def analyse(self, run: Path, told: Told, *, urgent: bool = True) -> None:
        """Has a run analysed; `told` gets an `Analysis`, or why there is none, in another thread."""
        self._ask(("analyse", str(run)), told, 0 if urgent else 2)

    def compare(self, before: Path, after: Path, told: Told) -> None:
        """Has two runs compared, likewise."""
        self._ask(("compare", str(before), str(after)), told, 1)

    def close(self) -> None:
        """Ends the process; what was asked for is not answered any more."""
        self._closed.set()
        thread, process = self._thread, self._process
        if process is not None:
            process.kill()  # it may be in the middle of a long analysis
        if thread is not None:
            self._asked.put((-1, 0, (), lambda answer: None))
            thread.join(timeout=5)

    def _ask(self, question: tuple[str, ...], told: Told, urgency: int) -> None:
        with self._lock:
            self._count += 1
            self._asked.put((urgency, self._count, question, told))
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="dashboard-analyst", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        connection: Connection | None = None
        while True:
            try:
                _, _, question, told = self._asked.get(timeout=IDLE_S)
            except Empty:
                self._end_process(connection)
                connection = None
                continue
            if self._closed.is_set():
                self._end_process(connection)
                return
            if connection is None:
                try:
                    self._process, connection = _start()
                except OSError as error:
                    told(f"the analysis could not be started: {error}")
                    continue
            answer = _answer_of(connection, question)
            if answer is None:
                connection.close()
                self._process.join(timeout=5)
                code, connection = self._process.exitcode, None
                answer = f"the analysis was ended from outside (exit code {code}; out of memory?)"
            told(answer)

    def _end_process(self, connection: Connection | None) -> None:
        if connection is None:
            return
        connection.close()  # which ends it
        self._process.join(timeout=1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _start() -> tuple[Any, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer_of(connection: Connection, question: tuple[str, ...]) -> Answer | None:
    """Returns the process's answer; `None` if it died over it."""
    try:
        connection.send(question)
        answer: Answer = connection.recv()
    except (EOFError, OSError):
        return None
    return answer


def _work(questions: Connection) -> None:
    """Answers until the server closes the connection, or is no more."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    while True:
        try:
            what, *runs = questions.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            answer: Answer = analyse(Path(runs[0])) if what == "analyse" else compare(*map(Path, runs))
        except DiagnoseError as error:
            answer = str(error)
        except KeyboardInterrupt:
            return
        except Exception as error:  # noqa: BLE001 (a damaged run, or a fault of ours: the page says so)
            answer = f"{type(error).__name__}: {error}"
        try:
            questions.send(answer)
        except OSError:
            return


def analyse(run: Path) -> Analysis:
    """Reads and analyses a run; of one that is too large the first rank alone.

    Raises:
        DiagnoseError: If that one is too large, or a newer version wrote it.
    """
    from diagnose.analysis.profile import analysed
    from diagnose.rules import diagnosed

    begun = monotonic()
    records = _records(run)
    only_first = sum(records) > MAX_RECORDS
    left_out = ""
    if only_first:
        if records[0] > MAX_RECORDS or len(records) == 1:
            raise _too_many(run, records)
        left_out = (
            f"Of {len(records)} ranks the first alone was analysed: {sum(records):,} steps of all are too"
            f" many beside the training. This looks at all of them: diagnose report {quote(str(run))}"
        )
    profile, parts = analysed(run, only_first=only_first)
    return Analysis(profile=diagnosed(profile), parts=parts, took_s=monotonic() - begun, left_out=left_out)


def compare(before: Path, after: Path) -> Compared:
    """Compares two runs.

    Raises:
        DiagnoseError: If one is too large, or a newer version wrote it.
    """
    from diagnose.analysis.predictions import prediction
    from diagnose.analysis.profile import compared, load_profile
    from diagnose.rules import diagnosed

    _refuse_if_huge(before)
    _refuse_if_huge(after)
    profiles = (diagnosed(load_profile(before)), diagnosed(load_profile(after)))
    comparison = compared((before, after), profiles)
    return Compared(comparison=comparison, profiles=profiles, prediction=prediction(*profiles, comparison))


def _refuse_if_huge(run: Path) -> None:
    records = _records(run)
    if sum(records) > MAX_RECORDS:
        raise _too_many(run, records)


def _too_many(run: Path, records: list[int]) -> DiagnoseError:
    return DiagnoseError(
        f"{sum(records):,} steps of all ranks are too many to ask the rules beside the training; "
        f"this asks them: diagnose report {quote(str(run))}"
    )


def _records(run: Path) -> list[int]:
    """Returns how many steps each rank recorded, of those that did."""
    import sqlite3

    from diagnose.store.runs import rank_files
    from diagnose.store.tail import look

    records = []
    for path in rank_files(run):
        with contextlib.suppress(sqlite3.DatabaseError, ValueError), look(path) as file:
            records.append(file.num_steps())
    return [steps for steps in records if steps]
