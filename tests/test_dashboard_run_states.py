"""A run in any state that it can be in, followed by the dashboard: without steps, killed, damaged, torn."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from diagnose.dashboards import _live
from diagnose.dashboards._live import Live
from diagnose.dashboards._look_kpis import _now
from diagnose.dashboards._tailing import RankTail

from diagnose.core.trial import Outcome, Safety, Trial
from diagnose.store.liveness import liveness
from diagnose.store.tail import look
from diagnose.store.writer import Writer
from tests.following import followed, until
from tests.recorded import MS, manifest, record, steps, writer


@pytest.fixture
def follow() -> Iterator[Callable[[Path], Live]]:
    with contextlib.ExitStack() as stack:
        yield lambda folder: stack.enter_context(followed(folder))


def test_a_run_without_steps_is_a_state_with_words(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run", exit_code=3)
    snapshot = until(follow(folder), lambda now: now.over)
    assert (snapshot.num_steps, len(snapshot.overview), snapshot.words) == (0, 0, "ended (exit 3)")
    assert snapshot.refuses == "The run has ended."


def test_a_run_of_one_step_is_drawn(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 1)
    snapshot = until(follow(folder), lambda now: now.over)
    assert (snapshot.num_steps, len(snapshot.overview), len(snapshot.recent)) == (1, 1, 1)


def test_a_run_that_was_killed_is_gone_and_its_steps_are_there(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = os.uname().nodename
    folder = manifest(tmp_path / "run", ended_unix=None, exit_code=None, host=host, pid=ended.pid)
    file = writer(folder, host=host, pid=ended.pid)
    file.add_steps(steps(0, 100))
    file.commit()  # and never closed
    snapshot = until(follow(folder), lambda now: now.over)
    assert snapshot.words.startswith("no longer running, not closed")
    assert snapshot.num_steps == 100
    file.close()


def test_a_damaged_flush_is_left_out_and_said(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 2000)
    with sqlite3.connect(folder / "rank0.sqlite") as db:
        db.execute("UPDATE chunks SET columns = x'00ff' WHERE first_step = 500")
        db.execute("UPDATE chunks SET totals = '[1, 2]' WHERE first_step = 1000")
    db.close()
    snapshot = until(follow(folder), lambda now: now.filled_share == 1.0)
    assert snapshot.overview.counts.sum() == 1000
    assert snapshot.num_steps == 2000
    (note,) = snapshot.notes
    assert "500 steps are damaged and left out" in note and "rows of it are left out" in note


def test_the_newest_steps_are_those_behind_what_is_damaged(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    with contextlib.closing(writer(folder)) as file:
        tail = RankTail(folder / "rank0.sqlite", (), first=True)
        for first in range(0, 300, 100):
            file.add_steps(steps(first, 100))
            file.commit()
            if first == 0:
                tail.poll()
            elif first == 100:
                with sqlite3.connect(folder / "rank0.sqlite") as db:
                    db.execute("UPDATE chunks SET columns = x'00ff' WHERE first_step = 100")
                db.close()
        tail.poll()
    assert tail.num_steps == 300
    assert tail.recent[:, 0].tolist() == [row[0] for row in steps(200, 100)]


def test_the_rate_of_all_ranks_waits_for_the_last_to_tell(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 1000)
    record(folder, 900, per_flush=100, rank=1)
    recent = until(follow(folder), lambda now: now.world_size == 2).recent
    assert recent.first + recent.counts.sum() == 900
    assert recent.samples_per_s.min() > 1.5 * 32 / 0.038


def test_the_rate_now_counts_a_stall_by_its_time_and_is_none_without_batch_sizes() -> None:
    (fact,) = _now(np.array([10.0] * 99 + [1010.0]), 1000 * 32 / np.array([10.0] * 99 + [1010.0]))
    assert fact.value == "1,600 samples/s"
    (fact,) = _now(np.array([10.0, 30.0]), np.array([np.nan, np.nan]))
    assert fact.value == "20.0 ms"
    assert _now(np.array([np.nan]), np.array([np.nan])) == []


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_named_and_the_others_are_read(
    tmp_path: Path, follow: Callable[[Path], Live], content: bytes
) -> None:
    folder = manifest(tmp_path / "run")
    (folder / "rank0.sqlite").write_bytes(content)
    record(folder, 100, rank=1)
    snapshot = until(follow(folder), lambda now: now.filled_share == 1.0 and now.num_steps == 100)
    assert snapshot.world_size == 1
    assert "rank0.sqlite" in snapshot.ranks[0].words
    assert any("rank0.sqlite" in note for note in snapshot.notes)


def test_a_file_of_a_newer_version_is_said_to_be_one(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 10)
    with sqlite3.connect(folder / "rank0.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    snapshot = until(follow(folder), lambda now: bool(now.notes))
    assert "written by a newer diagnose: format 99" in snapshot.notes[0]


def test_a_manifest_that_is_torn_is_said_to_be(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 10)
    (folder / "run.json").write_text('{"id": "ru')
    snapshot = until(follow(folder), lambda now: now.num_steps == 10)
    assert "run.json cannot be read; what it says of the run is missing." in snapshot.notes


def test_following_a_run_does_not_keep_the_job_from_closing_its_file(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    folder = manifest(tmp_path / "run", ended_unix=None, pid=os.getpid())
    file = writer(folder)
    file.add_steps(steps(0, 100))
    file.commit()
    live = follow(folder)
    until(live, lambda now: now.num_steps == 100)
    file.close()
    assert not (folder / "rank0.sqlite-wal").exists(), "one file is left"


def test_a_job_that_ends_while_its_file_is_read_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diagnose.store.writer.LONGEST_WAIT_MS", 50)
    file = Writer(tmp_path, 0)
    file.add_steps(steps(0, 100))
    file.commit()
    with look(tmp_path / "rank0.sqlite") as reading:
        assert reading.num_steps() == 100
        file.add_steps(steps(100, 50))
        file.close()
    with look(tmp_path / "rank0.sqlite") as reading:
        assert reading.num_steps() == 150


def test_a_run_that_nobody_looks_at_is_not_read(
    tmp_path: Path, follow: Callable[[Path], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_live, "UNWATCHED_S", 0.1)
    folder = manifest(tmp_path / "run")
    record(folder, 10)
    live = follow(folder)
    until(live, lambda now: now.num_steps == 10)
    looks: list[Path] = []
    monkeypatch.setattr(_live, "liveness", lambda run, facts: looks.append(run) or liveness(run, facts))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        looks.clear()
        time.sleep(10 * _live.POLL_S)
        if not looks:
            return
    pytest.fail("it is still looked at")


def test_a_run_that_is_measured_again_all_the_time_keeps_the_marks_that_tell(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    trial = Trial(action="loader-workers", value=2, safety=Safety.EXACT, outcome=Outcome.KEPT, reason="")
    measured = {"speedup": 1.2, "low": 1.1, "high": 1.3, "pairs": 2, "detectable": 1.1}
    again = {**measured, "without_ns": 2e6, "with_ns": 1e6}
    events = [(38 * MS, 0, "tuning", {"state": "trying", "step": 0})]
    events += [(40 * MS, 1, "trial", trial.as_record())]
    events += [((100 + n) * MS, n, "recheck", again) for n in range(3000)]
    events += [(5000 * MS, 3000, "undone", {"reason": "slower"})]
    folder = manifest(tmp_path / "run")
    record(folder, 3001, events=events)
    undone = "undone"
    snapshot = until(follow(folder), lambda now: any(mark.kind == undone for mark in now.marks))
    assert [mark.kind for mark in snapshot.marks] == ["trial", "undone"]
    assert snapshot.tuning is not None and snapshot.tuning.undone == "slower"
