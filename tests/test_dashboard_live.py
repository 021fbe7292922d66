"""What the dashboard knows of a run: read while it is written, in any state that a run can be in."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnose.dashboards import _live
from diagnose.dashboards._bins import MAX_BINS, Bins
from diagnose.dashboards._live import Live
from diagnose.dashboards._look_kpis import _now
from diagnose.dashboards._tailing import RankTail

from diagnose.analysis.profile import load_profile
from diagnose.analysis.readings import vitals_of
from diagnose.core.ledger import COUNTS
from diagnose.core.liveness import State
from diagnose.core.trial import Outcome, Safety, Trial
from diagnose.core.units import NS_PER_S
from diagnose.store.format import pack
from diagnose.store.liveness import liveness
from diagnose.store.tail import Chunk, look
from diagnose.store.writer import Writer
from tests.following import followed, until
from tests.recorded import MS, manifest, record, steps, writer


@pytest.fixture
def follow() -> Iterator[Callable[[Path], Live]]:
    with contextlib.ExitStack() as stack:
        yield lambda folder: stack.enter_context(followed(folder))


# -- bins


def chunks_of(rows: list[tuple[int, ...]], sizes: list[int]) -> list[Chunk]:
    """Cuts steps into chunks as the store has them."""
    chunks, first = [], 0
    for size in sizes:
        part = rows[first : first + size]
        if part:
            totals, packed_rows = pack(part)
            chunks.append(
                Chunk(first=first, num_steps=len(part), totals=json.loads(totals), packed=packed_rows)
            )
        first += size
    return chunks


@pytest.mark.parametrize("seed", range(5))
def test_bins_are_the_same_in_whatever_order_the_steps_come(seed: int) -> None:
    draw = random.Random(seed)
    rows = steps(0, 5000, seed=seed)
    sizes = [draw.randint(1, 400) for _ in range(200)]
    chunks = chunks_of(rows, sizes)
    draw.shuffle(chunks)
    bins = Bins()
    for chunk in chunks:
        assert bins.add(chunk, one_by_one=True)
    whole = np.array(rows)
    assert bins.width == 16
    used = bins.filled()
    assert used == slice(0, -(-5000 // 16)) and used.stop <= MAX_BINS
    for index in (0, 7, used.stop - 1):
        part = whole[index * 16 : (index + 1) * 16]
        assert bins.counts[index] == len(part)
        assert bins.sums[index, 1:].tolist() == part[:, 1:].sum(axis=0).tolist()
        assert bins.sums[index, 0] == part[-1, 0]
        assert bins.longest_ns[index] == part[:, len(COUNTS) :].sum(axis=1).max()


def test_sums_of_flushes_give_the_same_bins_as_their_steps() -> None:
    rows = steps(0, 3000)
    one_by_one, summed = Bins(), Bins()
    for chunk in chunks_of(rows, [3] * 1000):
        one_by_one.add(chunk, one_by_one=True)
        summed.add(chunk, one_by_one=False)
    assert (one_by_one.sums == summed.sums).all() and (one_by_one.counts == summed.counts).all()


def test_bins_that_begin_in_the_middle_of_a_run_stay_aligned_when_they_widen() -> None:
    bins = Bins(first=1001)
    bins.add_rows(1001, np.array(steps(0, 2000)))
    assert bins.start % bins.width == 0
    assert bins.start + bins.width > 1001
    assert bins.counts.sum() == 2000
    assert bins.counts[0] == bins.start + bins.width - 1001


# -- following


def test_a_run_is_followed_while_it_is_written(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run", ended_unix=None, exit_code=None, pid=os.getpid())
    live = follow(folder)
    assert live.snapshot().num_steps == 0
    file = writer(folder)
    written = 0
    for count in (1, 10, 500, 700):
        file.add_steps(steps(written, count))
        file.commit()
        written += count
        snapshot = until(live, lambda now: now.num_steps == written)  # noqa: B023 (called in the loop)
        assert snapshot.overview.counts.sum() == written
        assert len(snapshot.recent) == min(written, 512)
        assert not snapshot.over
    last = np.array(steps(written - 700, 700))[-1, len(COUNTS) :].sum() / MS
    assert snapshot.recent.step_ms[-1] == pytest.approx(last)
    assert snapshot.recent.first + len(snapshot.recent) == written
    file.close()


def test_of_a_run_on_another_machine_the_time_since_its_last_record_goes_on(
    tmp_path: Path, follow: Callable[[Path], Live]
) -> None:
    folder = manifest(tmp_path / "run", ended_unix=None, exit_code=None)
    file = writer(folder, state={"updated_unix": time.time() - 100, "finished": False})
    file.close()
    live = follow(folder)
    first = until(live, lambda now: now.liveness.last_record_s is not None).liveness
    assert first.state is State.CANNOT_TELL and first.last_record_s is not None
    later_s = first.last_record_s + 0.2
    until(live, lambda now: (now.liveness.last_record_s or 0.0) > later_s)


def test_no_step_is_read_twice(
    tmp_path: Path, follow: Callable[[Path], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    rows = Chunk.rows
    monkeypatch.setattr(Chunk, "rows", lambda chunk: (read.append(chunk.first), rows(chunk))[1])
    folder = manifest(tmp_path / "run", ended_unix=None, pid=os.getpid())
    file = writer(folder)
    file.add_steps(steps(0, 500))
    file.commit()
    live = follow(folder)
    until(live, lambda now: now.num_steps == 500)
    before = len(read)
    file.add_steps(steps(500, 500))
    file.commit()
    until(live, lambda now: now.num_steps == 1000)
    assert set(read[before:]) == {500}
    file.close()


def test_the_newest_steps_come_first_and_the_history_behind(
    tmp_path: Path, follow: Callable[[Path], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 20_000, per_flush=100)
    monkeypatch.setattr(_live, "FILL_S", 0.0)  # no history at all
    live = follow(folder)
    snapshot = live.snapshot()
    assert len(snapshot.recent) == 512
    assert snapshot.recent.first == 20_000 - 512
    assert snapshot.num_steps == 20_000
    assert snapshot.filled_share < 0.1
    assert np.isnan(snapshot.overview.step_ms).sum() == 0, "only what was read is drawn"
    monkeypatch.setattr(_live, "FILL_S", 0.05)
    snapshot = until(live, lambda now: now.filled_share == 1.0)
    assert snapshot.overview.counts.sum() == 20_000
    assert len(snapshot.overview) <= MAX_BINS


def test_the_series_agree_with_the_report(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 3000)
    profile = load_profile(folder)
    series = until(follow(folder), lambda now: now.filled_share == 1.0).overview
    for phase, mean_ns in profile.phase_time_ns.items():
        if mean_ns:
            drawn = (series.phase_ms[phase] * series.counts).sum() / series.counts.sum()
            assert drawn == pytest.approx(mean_ns / MS, rel=1e-9)
    assert sum(series.phase_ms.values()) == pytest.approx(series.step_ms)
    rate = (series.samples_per_s * series.step_ms * series.counts).sum() / (
        series.step_ms * series.counts
    ).sum()
    assert rate == pytest.approx(profile.throughput.samples_per_s)


def test_a_range_is_read_by_step(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 10_000)
    live = follow(folder)
    until(live, lambda now: now.filled_share == 1.0)
    few = live.steps(1234, 1300)
    assert (few.first, few.width, len(few), few.counts.sum()) == (1234, 1, 66, 66)
    many = live.steps(1234, 9999, max_bins=100)
    assert many.counts.sum() == 9999 - 1234
    assert len(many) <= 100 and many.width == 128 and many.first % 128 == 0
    assert len(live.steps(20_000, 30_000)) == 0
    assert len(live.steps(-5, -1)) == 0


def test_what_tuning_did_is_marked_where_it_did_it(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    trial = Trial(action="loader-workers", value=2, safety=Safety.EXACT, outcome=Outcome.KEPT, reason="")
    command = {"command": "undo", "argument": "tf32-matmul", "state": "refused", "reason": "not in force"}
    folder = manifest(tmp_path / "run")
    events = [
        (38 * MS, 0, "tuning", {"state": "observing", "step": 0}),
        (3838 * MS, 100, "trial", trial.as_record()),
        (3900 * MS, 101, "trial", {"action": "torn"}),
        (4000 * MS, 105, "command", command),
        (4001 * MS, 105, "gc", {}),
    ]
    record(folder, 1000, events=events)
    snapshot = until(follow(folder), lambda now: now.filled_share == 1.0)
    told = [(mark.step, round(mark.time_s, 1), mark.label, mark.strong) for mark in snapshot.marks]
    assert told == [
        (0, 0.0, "observing", False),
        (100, 3.8, "loader-workers=2 kept", True),
        (105, 4.0, "undo tf32-matmul: refused (not in force)", False),
    ]


def test_memory_and_cpus_are_levels_and_rates(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 1000)
    vitals = until(follow(folder), lambda now: now.filled_share == 1.0).vitals
    assert vitals.resident_bytes.tolist() == [1 << 30] * 20
    assert np.isnan(vitals.process_cpus[0])
    assert vitals.process_cpus[1:] == pytest.approx(1.0)
    assert vitals.busy_cpus[1:] == pytest.approx(2.0)
    assert np.isnan(vitals.swapped_bytes).all(), "not measured is not zero"
    assert vitals.device is None


def test_a_device_is_drawn_at_the_times_its_driver_was_read():
    reading = {"time_ns": 2 * NS_PER_S, "busy_share": 0.9, "sm_hz": 0.7e9, "power_w": 300}
    rows: list[Any] = [
        (NS_PER_S, 10, {"allocator": {"allocated_bytes": 5, "reserved_bytes": 8}}),
        (3 * NS_PER_S, 20, {"device": reading}),
        (4 * NS_PER_S, 30, {"device": {"time_ns": 3 * NS_PER_S, "sm_hz": 1.4e9, "power_limit_w": 400}}),
    ]
    vitals = vitals_of(rows, NS_PER_S, {"max_sm_hz": 1.4e9})
    assert vitals.allocated_bytes[0] == 5 and np.isnan(vitals.allocated_bytes[1:]).all()
    lane = vitals.device
    assert lane is not None
    assert lane.time_s.tolist() == [1, 2]
    assert lane.clock_percent.tolist() == [50, 100]
    assert lane.busy_percent[0] == 90 and np.isnan(lane.busy_percent[1])
    assert np.isnan(lane.power_percent).all(), "the power or its limit was not told"


# -- states of a run


def test_a_run_without_steps_is_a_state_with_words(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run", exit_code=3)
    snapshot = until(follow(folder), lambda now: now.over)
    assert (snapshot.num_steps, len(snapshot.overview), snapshot.words) == (0, 0, "ended (exit 3)")
    assert snapshot.control.words == "The run has ended."


def test_a_run_of_one_step_is_drawn(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 1)
    snapshot = until(follow(folder), lambda now: now.over)
    assert (snapshot.num_steps, len(snapshot.overview), len(snapshot.recent)) == (1, 1, 1)
    assert snapshot.overview.end_s[0] == 0.0


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
