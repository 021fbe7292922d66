"""What the dashboard knows of a run: read while it is written, in any state that a run can be in."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnose.dashboards import _analyst, _live
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._bins import MAX_BINS, Bins
from diagnose.dashboards._live import Live
from diagnose.dashboards._look_kpis import _now
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards._source import Source
from diagnose.dashboards._tailing import RankTail
from diagnose.dashboards._vitals import vitals_of

from diagnose.analysis.profile import load_profile
from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COUNTS
from diagnose.core.phases import Phase
from diagnose.core.trial import Outcome, Safety, Trial
from diagnose.core.units import NS_PER_S
from diagnose.report import to_json
from diagnose.rules import diagnosed
from diagnose.store.format import pack
from diagnose.store.liveness import liveness
from diagnose.store.tail import Chunk, look
from diagnose.store.writer import Writer
from tests.recorded import MS, manifest, record, steps, writer
from tests.running import REPOSITORY, has_ended

WAIT_S = 30
"""A machine under load takes its time."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_live, "POLL_S", 0.02)
    monkeypatch.setattr(_live, "LIVENESS_EVERY_S", 0.02)


class NoAnalyst(Analyst):
    """Answers at once that it will not: most of these tests are of what needs no rules."""

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        told("not asked for")


@pytest.fixture
def follow(quick: None) -> Iterator[Callable[[Path], Live]]:
    opened: list[Live] = []

    def open_run(folder: Path) -> Live:
        opened.append(Live(folder, NoAnalyst()))
        return opened[-1]

    yield open_run
    for live in opened:
        live.close()


def until(live: Live, holds: Callable[[Snapshot], bool]) -> Snapshot:
    end = time.monotonic() + WAIT_S
    while not holds(snapshot := live.snapshot()):
        if time.monotonic() > end:
            state = f"version {snapshot.version}, {snapshot.words}, {snapshot.num_steps} steps"
            pytest.fail(f"not in {WAIT_S} s: {state}, {snapshot.notes}, {snapshot.analysis}", pytrace=False)
        time.sleep(0.01)
    return snapshot


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


@pytest.mark.parametrize("ranks", [8, 2])
def test_the_slowest_rank_is_named_with_its_phase(
    tmp_path: Path, follow: Callable[[Path], Live], ranks: int
) -> None:
    folder = manifest(tmp_path / "run")
    slow = ranks - 1
    usual = {"data_wait": 3.0, "forward": 10.0, "communication": 5.0}
    for rank in range(ranks):
        late = {"data_wait": 6.0, "forward": 10.0, "communication": 2.0}
        record(folder, 2000, rank=rank, slots_ms=late if rank == slow else usual)
    snapshot = until(follow(folder), lambda now: now.filled_share == 1.0 and now.world_size == ranks)
    late_by = snapshot.lateness
    assert late_by is not None
    assert (late_by.straggler, late_by.cause) == (slow, Phase.DATA_WAIT)
    assert late_by.straggler_ms == pytest.approx(3.0, abs=0.2)
    assert np.nanmean(late_by.late_ms[slow]) == pytest.approx(3.0, abs=0.2), "the map agrees"
    assert late_by.late_ms.shape == (ranks, late_by.communication_ms.shape[1])
    assert late_by.late_ms.shape[1] <= 128
    assert np.nanmean(late_by.communication_ms[slow]) == pytest.approx(2.0, abs=0.1)
    rate = snapshot.overview.samples_per_s[0]
    assert rate == pytest.approx(ranks * 32 / 0.018, rel=0.05), "the throughput is of all ranks together"


def test_ranks_that_are_alike_have_no_straggler(tmp_path: Path, follow: Callable[[Path], Live]) -> None:
    folder = manifest(tmp_path / "run")
    for rank in range(4):
        record(folder, 1000, rank=rank)
    snapshot = until(follow(folder), lambda now: now.filled_share == 1.0 and now.world_size == 4)
    assert snapshot.lateness is not None and snapshot.lateness.straggler is None


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
    monkeypatch.setattr(_live, "liveness", lambda run: looks.append(run) or liveness(run))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        looks.clear()
        time.sleep(10 * _live.POLL_S)
        if not looks:
            return
    pytest.fail("it is still looked at")


# -- the rules, in their process


def test_the_analysis_is_the_report_to_the_digit_and_its_process_ends_with_the_server(
    tmp_path: Path, quick: None
) -> None:
    record(manifest(tmp_path / "run"), 400)
    analyst = Analyst()
    live = Live(tmp_path / "run", analyst)
    try:
        snapshot = until(live, lambda now: now.over)
        assert snapshot.profile is not None
        assert to_json(snapshot.profile) == to_json(diagnosed(load_profile(tmp_path / "run")))
        process = analyst._process
        assert process.is_alive()
    finally:
        live.close()
        analyst.close()
    assert not process.is_alive()


def test_an_analysis_that_is_killed_is_said_to_be_and_the_next_one_works(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 50)
    analyst, answers, told = Analyst(), [], threading.Event()

    def take(answer: object) -> None:
        answers.append(answer)
        told.set()

    try:
        analyst.analyse(folder, take)
        assert told.wait(WAIT_S)
        os.kill(analyst._process.pid, signal.SIGKILL)
        for _ in range(2):
            told.clear()
            analyst.analyse(folder, take)
            assert told.wait(WAIT_S)
    finally:
        analyst.close()
    assert str(answers[1]).startswith("the analysis was ended from outside (exit code -9")
    assert answers[2].profile.steps.count == 50  # type: ignore[attr-defined]


SERVER = """
import sys, time
from pathlib import Path
from diagnose.dashboards._analyst import Analyst

if __name__ == "__main__":
    analyst = Analyst()
    analyst.analyse(Path(sys.argv[1]), lambda answer: print(analyst._process.pid, flush=True))
    time.sleep(60)
"""


def test_no_analyst_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    record(manifest(tmp_path / "run"), 50)
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    analyst = int(server.stdout.readline())
    server.kill()
    server.wait()
    server.stdout.close()
    assert has_ended(analyst, within_s=WAIT_S)


def test_a_run_that_would_take_gigabytes_is_not_analysed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 100)
    monkeypatch.setattr(_analyst, "MAX_RECORDS", 99)
    with pytest.raises(DiagnoseError, match="100 steps of all ranks are too many"):
        _analyst.analyse(folder)


# -- the runs


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "../run", "no such", "x" * 200, "run\x00", "linked"]
)
def test_only_a_listed_run_is_opened(tmp_path: Path, name: str) -> None:
    record(manifest(tmp_path / "elsewhere" / "secret"), 5)
    root = tmp_path / "runs"
    record(manifest(root / "run"), 5)
    (root / "linked").symlink_to(tmp_path / "elsewhere" / "secret")
    source = Source(root)
    with pytest.raises(DiagnoseError):
        source.folder(name)
    assert source.folder("run") == root / "run"


def test_a_source_file_is_shown_only_where_the_analysis_names_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(f"line {number}" for number in range(1, 21)))
    folder = manifest(tmp_path / "runs" / "run")
    file = writer(folder)
    file.add_steps(steps(0, 400))
    file.add_samples(0, [(0, [("", 0, ""), (str(script), 10, "main")], 1_000_000_000)])
    file.close()
    source = Source(tmp_path / "runs")
    try:
        live = source.run("run")
        snapshot = until(live, lambda now: now.profile is not None)
        assert snapshot.profile is not None
        assert [line.file for line in snapshot.profile.where] == [str(script)]
        assert source.source_lines("run", str(script), 10, around=1) == (
            (9, "line 9"),
            (10, "line 10"),
            (11, "line 11"),
        )
        assert source.source_lines("run", "/etc/passwd", 1) == ()
        assert source.source_lines("other", str(script), 1) == ()
    finally:
        source.close()


def test_the_list_tells_what_is_known_without_reading_every_step(tmp_path: Path) -> None:
    record(manifest(tmp_path / "good", started_unix=1.0), 400)
    manifest(tmp_path / "empty", started_unix=2.0, exit_code=1)
    (manifest(tmp_path / "bad", started_unix=3.0) / "rank0.sqlite").write_bytes(b"no database" * 100)
    source = Source(tmp_path)
    try:
        rows = {row.id: row for row in source.runs()}
    finally:
        source.close()
    assert list(rows) == ["bad", "empty", "good"]
    assert (rows["good"].num_steps, rows["good"].words) == (400, "ended (ok)")
    assert rows["good"].step_ms == pytest.approx(38.2, abs=0.5)
    assert rows["good"].samples_per_s == pytest.approx(32 / 0.0382, rel=0.02)
    assert (rows["empty"].num_steps, rows["empty"].step_ms) == (0, None)
    assert rows["bad"].note


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


def test_an_analyst_that_nobody_asks_lets_its_process_go_and_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_analyst, "IDLE_S", 0.1)
    folder = manifest(tmp_path / "run")
    record(folder, 50)
    analyst, told, processes = Analyst(), threading.Event(), []
    try:
        for _ in range(2):
            told.clear()
            analyst.analyse(folder, lambda answer: told.set())
            assert told.wait(WAIT_S)
            processes.append(analyst._process)
            end = time.monotonic() + WAIT_S
            while processes[-1].is_alive() and time.monotonic() < end:
                time.sleep(0.02)
        assert not any(process.is_alive() for process in processes)
        assert processes[0] is not processes[1]
    finally:
        analyst.close()
