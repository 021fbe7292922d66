"""Runs of many ranks, followed live: a look takes as long as it may, the rest comes in turn."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from diagnose.dashboards import _followed, _rank_series
from diagnose.dashboards._composed import composed
from diagnose.dashboards._followed import Followed
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards._tailing import FIRST_CHUNKS, RankTail
from diagnose.dashboards._throughput import FAR_BEHIND

from diagnose.core.liveness import Liveness, State
from diagnose.store.tail import MAX_CHUNKS, Look
from diagnose.store.writer import Writer
from tests.following import followed, until
from tests.recorded import BATCH, MS, manifest, record, steps, writer

STEP_S = 0.038
"""Of the steps that `recorded.steps` makes."""


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for asking is over when one rank has been asked beside the first."""
    monkeypatch.setattr(_followed, "ASK_S", -1.0)


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were asked."""
    asked: list[int] = []
    poll = RankTail.poll
    monkeypatch.setattr(RankTail, "poll", lambda tail: (asked.append(tail.number), poll(tail))[1])
    return asked


@contextlib.contextmanager
def job(folder: Path, ranks: int, num_steps: int) -> Iterator[list[Writer]]:
    """A job that goes on."""
    facts = {"host": os.uname().nodename, "pid": os.getpid()}
    manifest(folder, ended_unix=None, exit_code=None, started_unix=time.time(), **facts)
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(contextlib.closing(writer(folder, rank, **facts))) for rank in range(ranks)
        ]
        for file in files:
            train(file, 0, num_steps)
        yield files


def train(file: Writer, first: int, count: int) -> None:
    file.add_steps(steps(first, count, spread=0))
    file.commit()


def test_after_a_restart_the_ranks_of_the_newest_attempt_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with job(folder, 3, 100):
        ranks = Followed(folder)
        assert ranks.find() and ranks.ask()
        for rank, expected in ((1, [(1, 30)]), (0, [(0, 30), (1, 30)])):
            with contextlib.closing(writer(folder, rank, restart=1)) as file:
                train(file, 0, 30)
            assert ranks.find() and ranks.ask()
            assert [(tail.number, tail.num_steps) for tail in ranks.tails] == expected


def drawn(ranks: Followed) -> Snapshot:
    return composed(
        1, ranks.folder, {"id": "run"}, Liveness(state=State.RUNNING), ranks.tails, {}, ranks.met
    )


def test_the_first_rank_is_asked_each_time_and_the_others_in_turn(
    tmp_path: Path, one_at_a_time: None, polled: list[int]
) -> None:
    folder = manifest(tmp_path / "run")
    for rank in range(6):
        record(folder, 100, rank=rank)
    ranks = Followed(folder)
    ranks.find()
    for _ in range(5):
        assert not ranks.all_asked
        ranks.ask()
    assert polled == [0, 1, 0, 2, 0, 3, 0, 4, 0, 5]
    assert ranks.all_asked
    assert [tail.num_steps for tail in ranks.tails] == [100] * 6


def test_where_there_is_time_all_ranks_are_asked(tmp_path: Path, polled: list[int]) -> None:
    folder = manifest(tmp_path / "run")
    for rank in range(6):
        record(folder, 10, rank=rank)
    ranks = Followed(folder)
    ranks.find()
    ranks.ask()
    assert polled == [0, 1, 2, 3, 4, 5]


def test_ranks_that_have_not_been_asked_yet_are_taken_to_go_on_as_the_others(
    tmp_path: Path, one_at_a_time: None
) -> None:
    with job(tmp_path / "run", 8, 50) as files:
        ranks = Followed(tmp_path / "run")
        ranks.find()
        for _ in range(7):
            ranks.ask()
        for file in files:
            train(file, 50, 150)
        ranks.ask()
        snapshot = drawn(ranks)
    assert sorted(tail.num_steps for tail in ranks.tails) == [50] * 6 + [200] * 2
    for series in (snapshot.overview, snapshot.recent):
        assert series.counts.sum() == 200
        assert series.samples_per_s == pytest.approx(8 * BATCH / STEP_S)


def test_a_rank_that_has_stopped_is_not_taken_to_go_on(tmp_path: Path, one_at_a_time: None) -> None:
    with job(tmp_path / "run", 4, 50) as files:
        ranks = Followed(tmp_path / "run")
        ranks.find()
        for first in (50, 50 + FAR_BEHIND):
            for file in files[:3]:
                train(file, first, FAR_BEHIND)
            for _ in range(3):
                ranks.ask()
        for file in files[:3]:
            train(file, 50 + 2 * FAR_BEHIND, 10)
        ranks.ask()
        overview = drawn(ranks).overview
    whole, rest = 4 * BATCH / STEP_S, 3 * BATCH / STEP_S
    assert overview.width == 1
    assert overview.samples_per_s[:50] == pytest.approx(whole)
    assert overview.samples_per_s[50:] == pytest.approx(rest)


def test_history_that_is_still_to_be_read_does_not_make_the_job_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diagnose.dashboards._tailing.RECENT_STEPS", 100)
    monkeypatch.setattr("diagnose.dashboards._tailing.MAX_CHUNKS", 3)
    with job(tmp_path / "run", 4, 1) as files:
        for file in files:
            for first in range(1, 500, 20):
                train(file, first, 20)
        ranks = Followed(tmp_path / "run")
        ranks.find()
        ranks.ask()
        seen = 0
        while ranks.fill():
            overview = drawn(ranks).overview
            assert overview.samples_per_s == pytest.approx(4 * BATCH / STEP_S)
            seen += 1
    assert seen > 10


def test_ranks_are_in_order_and_the_first_tells_all_whenever_its_file_is_made(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    ranks = Followed(folder)
    state = (0, 0, "tuning", {"state": "trying", "step": 0})
    for rank in (10, 9, 0, 2):
        record(folder, 20 + rank, rank=rank, events=[state] * (rank + 1))
        ranks.find()
        ranks.ask()
    assert [tail.number for tail in ranks.tails] == [0, 2, 9, 10]
    assert [tail.num_steps for tail in ranks.tails] == [20, 22, 29, 30]
    assert [len(tail.events) for tail in ranks.tails] == [1, 0, 0, 0]
    assert ranks.all_asked


def test_a_run_is_over_when_every_rank_has_told_its_last_steps(tmp_path: Path, one_at_a_time: None) -> None:
    folder = tmp_path / "run"
    with job(folder, 12, 20) as files, followed(folder) as live:
        until(live, lambda now: sum(rank.num_steps for rank in now.ranks) == 12 * 20)
        for file in files:
            train(file, 20, 30)
        known = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**known, "ended_unix": time.time(), "exit_code": 0}))
        snapshot = until(live, lambda now: now.over)
    assert [rank.num_steps for rank in snapshot.ranks] == [50] * 12


def test_what_ranks_wait_is_compared_when_all_of_them_have_been_asked(
    tmp_path: Path, one_at_a_time: None
) -> None:
    folder = manifest(tmp_path / "run")
    for rank in range(5):
        with contextlib.closing(writer(folder, rank)) as file:
            rows = steps(0, 100, spread=0)
            file.add_steps(rows)
            file.add_meetings([(row[0] - MS - rank * MS, row[0] - MS) for row in rows])
    ranks = Followed(folder)
    ranks.find()
    for _ in range(4):
        assert ranks.met is None
        ranks.ask()
        while ranks.fill():
            pass
    assert ranks.met is not None
    assert (ranks.met.num_steps, len(ranks.met.held_ns)) == (100, 5)
    assert ranks.met.held_ns.sum(axis=1).argmax() == 0, "who waits least came last"


def test_whether_a_run_goes_on_is_told_without_a_second_look_at_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr("diagnose.store.liveness._facts", lambda path: opened.append(path) or {})
    with job(tmp_path / "run", 3, 20), followed(tmp_path / "run") as live:
        until(live, lambda now: now.liveness.state is State.RUNNING and now.world_size == 3)
    assert not opened


@pytest.mark.parametrize(
    "per_flush, most", [(500, FIRST_CHUNKS), (10, 2 * FIRST_CHUNKS), (1, 4 * FIRST_CHUNKS)]
)
def test_no_more_is_read_than_the_newest_steps_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_flush: int, most: int
) -> None:
    with contextlib.closing(writer(tmp_path)) as file:
        for first in range(0, 520 * min(10, per_flush), per_flush):
            file.add_steps(steps(first, per_flush, spread=0))
    limits: list[int] = []
    before: Callable[..., list[object]] = Look.chunks_before
    monkeypatch.setattr(
        Look,
        "chunks_before",
        lambda look, step, limit=MAX_CHUNKS: (limits.append(limit), before(look, step, limit))[1],
    )
    tail = RankTail(tmp_path / "rank0.sqlite", (), first=True)
    tail.poll()
    assert limits[-1] == most
    assert len(tail.recent) == 512


def test_a_reader_that_comes_late_misses_no_step_of_what_was_merged_meanwhile(tmp_path: Path) -> None:
    tail = RankTail(tmp_path / "rank0.sqlite", (), first=True)
    told = 0
    with contextlib.closing(writer(tmp_path)) as file:
        for look in (3, 50, 200, 203, 500):
            while told < look:
                train(file, told, 1)
                told += 1
            tail.poll()
            assert tail.num_steps == told
            assert tail.bins.counts[:told].tolist() == [1] * told
    assert tail.words == ""
    assert tail.recent[:, 0].tolist() == [steps(step, 1, spread=0)[0][0] for step in range(500)]


def test_only_ranks_that_told_something_new_are_drawn_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    rates_of = _rank_series.rates_of
    monkeypatch.setattr(_rank_series, "rates_of", lambda sums: (made.append(len(sums)), rates_of(sums))[1])
    with job(tmp_path / "run", 16, 100) as files:
        ranks = Followed(tmp_path / "run")
        ranks.find()
        ranks.ask()
        before = drawn(ranks)
        assert len(made) == 2 * 16, "of each its bins and its newest steps"
        made.clear()
        train(files[5], 100, 20)
        ranks.ask()
        after = drawn(ranks)
    assert len(made) == 2
    assert before.lateness is not None and after.lateness is not None
    assert np.array_equal(
        before.lateness.communication.values_ms, after.lateness.communication.values_ms[:, :100]
    )
