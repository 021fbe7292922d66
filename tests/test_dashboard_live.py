"""What the dashboard knows of a run, read while it is written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnose.dashboards import _live
from diagnose.dashboards._bins import MAX_BINS, Bins
from diagnose.dashboards._live import Live

from diagnose.analysis.profile import load_profile
from diagnose.analysis.readings import vitals_of
from diagnose.core.ledger import COUNTS
from diagnose.core.liveness import State
from diagnose.core.trial import Outcome, Safety, Trial
from diagnose.core.units import NS_PER_S
from diagnose.store.format import pack
from diagnose.store.tail import Chunk
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
    many = live.steps(1234, 9999)
    assert many.counts.sum() == 9999 - 1234
    assert len(many) <= MAX_BINS and many.width == 16 and many.first % 16 == 0
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
    told = [(mark.step, mark.label, mark.strong) for mark in snapshot.marks]
    assert told == [
        (0, "observing", False),
        (100, "loader-workers=2 kept", True),
        (105, "undo tf32-matmul: refused (not in force)", False),
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
