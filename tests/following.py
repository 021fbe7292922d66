"""A run followed as the dashboard does, quickly, for tests of what it makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from diagnose.dashboards import _live
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._live import Live
from diagnose.dashboards._snapshot import Snapshot

WAIT_S = 30
"""A machine under load takes its time."""


class NoAnalyst(Analyst):
    """Answers at once that it will not: most of these tests are of what needs no rules."""

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        told("not asked for")


@contextmanager
def quickly() -> Iterator[None]:
    """Looks fifty times as often."""
    with patch.object(_live, "POLL_S", 0.02), patch.object(_live, "LIVENESS_EVERY_S", 0.02):
        yield


@contextmanager
def followed(folder: Path) -> Iterator[Live]:
    """Follows a run whose rules nobody asks."""
    with quickly():
        live = Live(folder, NoAnalyst())
        try:
            yield live
        finally:
            live.close()


def until(live: Live, holds: Callable[[Snapshot], bool]) -> Snapshot:
    """Returns the first snapshot of which this holds."""
    end = time.monotonic() + WAIT_S
    while not holds(snapshot := live.snapshot()):
        if time.monotonic() > end:
            state = f"version {snapshot.version}, {snapshot.words}, {snapshot.num_steps} steps"
            pytest.fail(f"not in {WAIT_S} s: {state}, {snapshot.notes}, {snapshot.analysis}", pytrace=False)
        time.sleep(0.01)
    return snapshot
