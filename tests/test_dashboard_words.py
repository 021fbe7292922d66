"""What the pages say of a run in a state that charts do not show."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dash._utils import to_json
from diagnose.dashboards import _analyst, _live, _source, before_after, input, ranks
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._live import Live
from diagnose.dashboards._look_run import verdict_of
from diagnose.dashboards._server import DashboardApp, create_app

from diagnose.analysis.profile import load_profile
from diagnose.core.deep_window import KIND as DEEP
from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import Liveness, State
from diagnose.core.trial import Measured, Outcome, Safety, Trial, Tuning
from diagnose.report._status import status_text
from diagnose.report._terminal import Terminal
from diagnose.store.runs import LOST
from tests.following import WAIT_S, quickly, tick, until
from tests.recorded import MS, manifest, record, steps, writer

FULL = "database or disk is full; all records are lost"


class AtOnce(Analyst):
    """Analyses here and now: another process takes two seconds to start."""

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        try:
            told(_analyst.analyse(run))
        except DiagnoseError as error:
            told(str(error))


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
    assert words in to_json(input.InputPipeline().draw(full, {}))
    again = until(live, lambda now: now.profile is not None and bool(now.profile.run.lost))
    assert verdict_of(again).first.startswith(words)
    status = status_text(load_profile(folder), Liveness(state=State.RUNNING), Terminal(width=200))
    assert words[1:].rstrip(".") in status and "no step has ended yet" not in status


# -- beside what the rules say


def test_a_deep_window_of_a_long_run_is_analysed_when_it_ends_not_when_the_run_has_grown(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    folder = training(tmp_path / "run")
    file = writer(folder, pid=os.getpid(), host=socket.gethostname())
    file.add_steps(steps(0, 1000))
    file.commit()
    live = follow(folder)
    until(live, lambda now: now.analysed_steps == 1000)
    for state in ("begun", "ended"):
        file.add_steps(steps(file.safe_steps, 10))
        file.add_events(
            [(40_000 * MS, file.safe_steps, DEEP, {"state": state, "first": 1000, "last": 1010})]
        )
        file.commit()
        until(live, lambda now: now.num_steps == file.safe_steps)
    assert until(live, lambda now: now.analysed_steps == 1020).liveness.state is State.RUNNING
    file.close()


# -- more than can be analysed beside a training

TRIAL = Trial(action="loader-workers", value=2, safety=Safety.EXACT, outcome=Outcome.KEPT, reason="")
TUNED = [
    (38 * MS, 0, "tuning", {"state": "trying", "step": 0}),
    (40 * MS, 1, "trial", TRIAL.as_record()),
]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A tuned run of two ranks, of 60 steps each."""
    folder = manifest(tmp_path / "run")
    for rank in (0, 1):
        record(folder, 60, rank=rank, world_size=2, events=[] if rank else TUNED)
    return folder


def test_of_a_run_that_is_too_large_the_first_rank_alone_is_analysed_and_nothing_said_of_the_others(
    large: Path, follow: Callable[[Path], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_analyst, "MAX_RECORDS", 100)
    snapshot = until(follow(large), lambda now: now.over)
    profile = snapshot.profile
    assert profile is not None and profile.steps.count == 60
    assert (profile.run.world_size, len(profile.ranks)) == (2, 1)
    assert profile.throughput.samples_per_s is None, "of all ranks together; one alone does not tell"
    assert not [note for note in profile.notes if "ranks are here" in note]
    assert "Of 2 ranks the first alone was analysed: 120 steps of all are too many" in snapshot.left_out
    assert snapshot.left_out in verdict_of(snapshot).more
    page = to_json(ranks.Ranks().draw(snapshot, {}))
    assert "not known" in page and "none is later" not in page


def test_of_a_run_that_cannot_be_analysed_the_trials_are_shown_all_the_same(
    large: Path, follow: Callable[[Path], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_analyst, "MAX_RECORDS", 50)
    snapshot = until(follow(large), lambda now: now.over)
    assert snapshot.profile is None and "120 steps of all ranks are too many" in snapshot.analysis
    page = to_json(before_after.BeforeAfter().draw(snapshot, {}))
    assert "loader-workers" in page and "kept" in page
    assert "The step before and after is not analysed yet" in page and "120 steps" in page
    assert verdict_of(snapshot).more[0] == "60 steps.", "it has ended: not so far"


def test_a_gain_that_was_confirmed_and_undone_heads_no_page() -> None:
    confirmed = Measured(
        speedup=1.5, low=1.2, high=1.8, pairs=9, detectable=1.1, without_ns=6e7, with_ns=4e7
    )
    kept = Trial(action="gc-freeze", safety=Safety.EXACT, outcome=Outcome.KEPT, reason="")
    tuning = Tuning(trials=(kept,), confirmation=confirmed)
    assert before_after._headline(tuning)[0].value == "1.5x"
    assert before_after._headline(replace(tuning, undone="the loss went wrong")) == []


# -- a page from tick to tick


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DashboardApp]:
    monkeypatch.setattr(_source, "Analyst", AtOnce)
    monkeypatch.setattr(_live, "ANALYSE_EVERY_S", 1e8)  # once
    with quickly():
        made = create_app(tmp_path)
        yield made
        made.source.close()


def shows(app: DashboardApp, page: str, drawn: Any, words: str) -> dict[str, Any]:
    """Ticks until a page shows these words; returns what that tick sent."""
    end = time.monotonic() + WAIT_S
    while words not in json.dumps(sent := tick(app, page, drawn)):
        assert time.monotonic() < end, f"{page} never showed {words!r}"
        drawn = sent[f"{page}-drawn"]["data"] if f"{page}-drawn" in sent else drawn
        time.sleep(0.01)
    return sent


@pytest.mark.parametrize("page", ["input", "kernels"])
def test_a_page_tells_how_the_run_stands_between_two_analyses(
    app: DashboardApp, tmp_path: Path, page: str
) -> None:
    file = writer(training(tmp_path / "run"), pid=os.getpid(), host=socket.gethostname())
    file.add_steps(steps(0, 40))
    file.commit()
    first = shows(app, page, None, "40 steps")
    file.add_steps(steps(40, 3))
    file.commit()
    then = shows(app, page, first[f"{page}-drawn"]["data"], "43 steps")
    assert f"{page}-title" in then
    has_chart = "Waiting for data, step by step" in json.dumps(then.get(f"{page}-body", ""))
    assert has_chart == (page == "input"), "whose chart grew by three steps; kernels have none"
    assert len(json.dumps(then)) < 60_000
    file.close()


def test_a_page_is_headed_as_its_link_is(app: DashboardApp, tmp_path: Path) -> None:
    record(manifest(tmp_path / "run"), 40)
    assert "Before / after" in json.dumps(
        shows(app, "before-after", None, "40 steps")["before-after-title"]
    )


def test_a_run_that_can_no_longer_be_read_leaves_no_old_verdict_beside_the_error(
    app: DashboardApp, tmp_path: Path
) -> None:
    record(manifest(tmp_path / "run"), 60)
    before = shows(app, "run", None, "step time, median")
    assert before["run-charts"]["hidden"] is False
    shutil.rmtree(tmp_path / "run")
    after = tick(app, "run", before["run-drawn"]["data"])
    assert "This run cannot be shown" in json.dumps(after["run-title"])
    assert not any(after[f"run-{part}"]["children"] for part in ("verdict", "kpis", "legend", "details"))
    assert after["run-charts"]["hidden"] and after["control"]["hidden"]
    assert after["run-drawn"]["data"] is None, "what it shows when it is there again is drawn anew"


def test_steps_of_a_run_that_is_over_are_shown_at_once_and_in_finer_bins_when_they_have_been_read(
    app: DashboardApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(manifest(tmp_path / "run"), 5000)
    shows(app, "run", None, "step time, median")
    until(app.source.run("run"), lambda now: now.over)
    may, read = threading.Event(), Live.steps
    monkeypatch.setattr(Live, "steps", lambda live, *asked: may.wait(WAIT_S) and read(live, *asked))
    asked = {"from": "1000", "to": "1100"}
    begun = time.monotonic()
    coarse = tick(app, "run", None, asked)
    assert time.monotonic() - begun < WAIT_S / 2, "it does not wait for what is being read"
    assert coarse["run-ledger"]["figure"]["data"][0]["dx"] == 16
    assert not app.source.is_settled("run"), "the clock of the page goes on"
    may.set()
    end, fine = time.monotonic() + WAIT_S, {}
    while not fine and time.monotonic() < end:
        fine = tick(app, "run", coarse["run-drawn"]["data"], asked)
    drawn = fine["run-ledger"]["figure"]["data"][0]
    assert (drawn["x0"], drawn["dx"]) == (1001, 1)
