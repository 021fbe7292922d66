"""What the pages say of a run in a state that charts do not show."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dash._utils import to_json
from diagnose.dashboards import _analyst, _live, input
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._listed import row_of
from diagnose.dashboards._live import Live
from diagnose.dashboards._look_run import verdict_of

from diagnose.analysis.profile import load_profile
from diagnose.core.liveness import Liveness, State
from diagnose.report._status import status_text
from diagnose.report._terminal import Terminal
from diagnose.store.runs import LOST
from tests.following import quickly, until
from tests.recorded import manifest

FULL = "database or disk is full; all records are lost"


class AtOnce(Analyst):
    """Analyses here and now: another process takes two seconds to start."""

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        told(_analyst.analyse(run))


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Live]]:
    monkeypatch.setattr(_live, "ANALYSE_EVERY_S", 0.0)
    monkeypatch.setattr(_live, "ANALYSE_SHARE", 1.0)
    followed: list[Live] = []

    def begin(folder: Path) -> Live:
        followed.append(Live(folder, AtOnce()))
        return followed[-1]

    with quickly():
        yield begin
        for live in followed:
            live.close()


def training(folder: Path) -> Path:
    """A run that goes on, in this process."""
    facts = {"ended_unix": None, "exit_code": None, "pid": os.getpid(), "host": socket.gethostname()}
    return manifest(folder, **facts, started_unix=2**33)


@pytest.mark.parametrize("said", [f"{FULL}.", ""], ids=["words", "no room for words"])
def test_a_disk_that_takes_no_records_is_told_while_the_job_still_trains(
    tmp_path: Path, follow: Callable[[Path], Live], said: str
) -> None:
    folder = training(tmp_path / "run")
    live = follow(folder)
    waits = until(live, lambda now: now.profile is not None)
    assert waits.liveness.state is State.RUNNING
    assert verdict_of(waits).first == "No step has been measured yet."
    (folder / LOST).write_text(said)
    words = f"{FULL[0].upper()}{FULL[1:]}." if said else "The disk had no room left, not even to say which"
    full = until(live, lambda now: bool(now.lost))
    assert verdict_of(full).first.startswith(words), "at once, before it is analysed again"
    assert verdict_of(full).code == "diagnose run --run-dir FOLDER ..."
    assert words in to_json(input._draw(full, {}))
    again = until(live, lambda now: now.profile is not None and bool(now.profile.run.lost))
    assert verdict_of(again).first.startswith(words)
    assert row_of(folder).note == again.lost
    status = status_text(load_profile(folder), Liveness(state=State.RUNNING), Terminal(width=200))
    assert words[1:].rstrip(".") in status and "no step has ended yet" not in status
