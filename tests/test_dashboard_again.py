"""What the dashboard does when a run that it knows is written to, or recorded again under its name."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnose.dashboards import _comparisons, _live
from diagnose.dashboards._analyst import Analyst, Compared, analyse, compare
from diagnose.dashboards._comparisons import Comparisons
from diagnose.dashboards._look_run import badge
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards._source import Source
from diagnose.dashboards._zoomed import Ranges

from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import State
from tests.following import WAIT_S, followed, until
from tests.recorded import manifest, record, steps, writer
from tests.running import comes_true

GOES_ON = {"ended_unix": None, "exit_code": None}


class Asked(Analyst):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[..., None]] = []

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        self.waiting.append(told)

    def compare(self, before: Path, after: Path, told: Callable[..., None]) -> None:
        self.waiting.append(told)


def recorded(folder: Path, num_steps: int, **facts: Any) -> Path:
    """A run in the place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    record(manifest(folder, **facts), num_steps)
    return folder


# -- recorded again


def test_a_run_that_was_recorded_again_is_drawn_and_analysed_anew(tmp_path: Path) -> None:
    folder, analyst = recorded(tmp_path / "run", 400), Asked()
    with followed(folder, analyst) as live:
        assert comes_true(lambda: analyst.waiting)
        first = analyse(folder)
        analyst.waiting.pop()(first)
        assert until(live, lambda now: now.over).profile is first.profile
        with (folder / "lost.txt").open("w") as file:
            file.write("a full disk")
        assert comes_true(lambda: analyst.waiting), "there is something new to say"
        recorded(folder, 50, started="2026-11-21T11:00:00+00:00")
        snapshot = until(live, lambda now: now.num_steps == 50)
        assert (len(snapshot.recent), snapshot.overview.counts.sum()) == (50, 50)
        assert snapshot.profile is None
        analyst.waiting.pop(0)(first)  # which was asked for before, and comes too late
        second = analyse(folder)

        def over(now: Snapshot) -> bool:
            while analyst.waiting:
                analyst.waiting.pop(0)(second)
            return now.over

        assert until(live, over).profile is second.profile


def test_a_range_is_of_the_run_that_is_there(tmp_path: Path) -> None:
    folder, ranges = recorded(tmp_path / "run", 100), Ranges()
    with followed(folder) as live:
        snapshot = until(live, lambda now: now.num_steps == 100)
        assert len(ranges.steps(live, snapshot, 40, 60, WAIT_S)[0]) == 20
        recorded(folder, 50, started="2026-11-21T11:00:00+00:00")
        snapshot = until(live, lambda now: now.num_steps == 50)
        assert len(ranges.steps(live, snapshot, 40, 60, WAIT_S)[0]) == 10


# -- started again


def test_ranks_that_were_started_again_are_analysed_anew(tmp_path: Path) -> None:
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "started_unix": 1.0}
    folder = recorded(tmp_path / "run", 400, **GOES_ON, **facts)
    analyst, ranges = Asked(), Ranges()
    with followed(folder, analyst) as live:
        assert comes_true(lambda: analyst.waiting)
        analyst.waiting.pop()(analyse(folder))
        snapshot = until(live, lambda now: now.profile is not None)
        assert len(ranges.steps(live, snapshot, 0, 100, WAIT_S)[0]) == 100
        with closing(writer(folder, 0, restart=1, **facts)) as file:
            file.add_steps(steps(0, 30))
            file.commit()
        snapshot = until(live, lambda now: now.num_steps == 30)
        assert snapshot.profile is None
        assert comes_true(lambda: len(ranges.steps(live, snapshot, 0, 100, WAIT_S)[0]) == 30)
        assert comes_true(lambda: analyst.waiting), "there is another run to say something of"


def test_a_run_whose_end_is_not_yet_analysed_is_no_alarm(tmp_path: Path) -> None:
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "started_unix": 1.0}
    folder, analyst = recorded(tmp_path / "run", 400, **GOES_ON, **facts), Asked()
    with followed(folder, analyst) as live:
        assert comes_true(lambda: analyst.waiting)
        analyst.waiting.pop()(analyse(folder))
        until(live, lambda now: now.profile is not None)
        manifest(folder, ended_unix=time.time(), exit_code=0, **facts)
        ended = until(live, lambda now: now.liveness.state is State.ENDED)
        assert "alarm" not in badge(ended).className
        failed = replace(ended.profile, run=replace(ended.profile.run, exit_code=3))
        assert "alarm" in badge(replace(ended, over=True, profile=failed)).className


# -- on another machine


def test_a_run_of_another_machine_is_analysed_as_seldom_as_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyst = Asked()
    with closing(writer(manifest(tmp_path / "run", **GOES_ON))) as file:
        file.add_steps(steps(0, 100))
        file.commit()
        with followed(tmp_path / "run", analyst) as live:
            assert comes_true(lambda: analyst.waiting)
            analyst.waiting.pop()("not now")
            file.add_steps(steps(100, 100))
            file.commit()
            snapshot = until(live, lambda now: now.num_steps == 200)
            assert snapshot.liveness.state is State.CANNOT_TELL
            time.sleep(10 * _live.POLL_S)
            assert not analyst.waiting
            monkeypatch.setattr(_live, "ANALYSE_EVERY_S", 0.0)
            assert comes_true(lambda: analyst.waiting)


# -- two runs


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return recorded(tmp_path / "a", 100), recorded(tmp_path / "b", 100)


@pytest.fixture
def asked(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Source, Asked]]:
    analyst = Asked()
    monkeypatch.setattr("diagnose.dashboards._source.Analyst", lambda: analyst)
    source = Source(pair[0].parent)
    yield source, analyst
    source.close()


def test_runs_are_compared_again_when_one_was_recorded_again(
    pair: tuple[Path, Path], asked: tuple[Source, Asked]
) -> None:
    source, analyst = asked
    assert source.compared("a", "b") is None and source.compared("a", "b") is None
    first = compare(*pair)
    analyst.waiting.pop()(first)
    assert source.compared("a", "b") is first and not analyst.waiting
    recorded(pair[1], 200)
    assert source.compared("a", "b") is first, "until there is another"
    second = compare(*pair)
    analyst.waiting.pop()(second)
    assert source.compared("a", "b") is second and not analyst.waiting
    assert second.comparison.num_steps == (100, 200)


def test_runs_that_go_on_are_compared_again_now_and_then(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_comparisons, "ANALYSE_SHARE", 1e9)  # of whatever it took
    analyst = Asked()
    comparisons = Comparisons(analyst)
    shutil.rmtree(pair[1])
    with closing(writer(manifest(pair[1], **GOES_ON))) as file:
        for first in (0, 100):
            file.add_steps(steps(first, 100))
            file.commit()
            comparisons.of(*pair)
        [told] = analyst.waiting
        told(compare(*pair))
        analyst.waiting.clear()
        comparisons.of(*pair)
        assert not analyst.waiting, "that was a moment ago"
        monkeypatch.setattr(_comparisons, "AGAIN_S", 0.0)
        comparisons.of(*pair)
        assert analyst.waiting
        told = analyst.waiting.pop()
        told(compare(*pair))
        comparisons.of(*pair)
        assert not analyst.waiting, "nothing is new"
        monkeypatch.setattr(_comparisons, "AGAIN_S", 60.0)
    manifest(pair[1])
    comparisons.of(*pair)
    assert analyst.waiting, "it has ended"


def test_why_runs_cannot_be_compared_stays_there_and_is_asked_again_after_a_minute(
    pair: tuple[Path, Path], asked: tuple[Source, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, analyst = asked
    assert source.compared("a", "b") is None
    analyst.waiting.pop()("too many steps")
    for _ in range(3):
        with pytest.raises(DiagnoseError, match="too many steps"):
            source.compared("a", "b")
    assert not analyst.waiting
    monkeypatch.setattr(_comparisons, "REFUSED_S", 0.0)
    with pytest.raises(DiagnoseError, match="too many steps"):
        source.compared("a", "b")
    analyst.waiting.pop()(compare(*pair))
    assert isinstance(source.compared("a", "b"), Compared)
