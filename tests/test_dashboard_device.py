"""The live charts of a run on a device show what the report shows: the ledger by the device's clock."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from dash._utils import to_json
from diagnose.dashboards import _device_steps
from diagnose.dashboards._bins import Bins
from diagnose.dashboards._composed import composed
from diagnose.dashboards._figure_run import legend
from diagnose.dashboards._followed import Followed
from diagnose.dashboards._series import rates_of, steps_of
from diagnose.dashboards._snapshot import Snapshot, Steps
from torch.utils.data import DataLoader

from diagnose.analysis.device_ledger import by_device_clock
from diagnose.core.ledger import COUNTS, DEVICE_COLUMNS
from diagnose.core.liveness import Liveness, State
from diagnose.core.phases import Phase
from diagnose.hooks.device_clock import follow
from diagnose.store.reader import read_rank
from diagnose.store.writer import Writer
from tests.fakes import SlowData, SlowModel, SlowOptimizer, measured
from tests.following import followed, until
from tests.recorded import MS, manifest, steps, writer
from tests.simulated_device import SharedClock, SimulatedDevice

BY_HOST = {"data_wait": 20.0, "backward": 5.0, "forward": 5.0}
"""What the host sees of a device that works the backward pass off while the loop waits for data."""

BY_DEVICE = {"data_wait": 4.0, "backward": 18.0, "forward": 8.0}


def device_rows(first: int, count: int, holes: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Steps by the device's clock; the same step is the same whoever asks for it."""
    made = []
    for step in range(first, first + count):
        longer = random.Random(step).uniform(0.5, 2.0)
        row = [int(BY_DEVICE.get(name, 0) * MS * longer) for name in DEVICE_COLUMNS]
        row[0] = int(step in holes)
        made.append(tuple(row))
    return made


def of_report(folder: Path) -> Steps:
    """What the report makes of the whole run, in the dashboard's bins."""
    rows = by_device_clock(read_rank(folder / "rank0.sqlite")).steps
    bins = Bins()
    bins.add_rows(0, rows)
    return steps_of(bins, rates_of(bins.sums), {})


def drawn(ranks: Followed, state: State = State.RUNNING) -> Snapshot:
    return composed(1, ranks.folder, {"id": "run"}, Liveness(state=state), ranks.tails, {}, ranks.met)


def assert_same(found: Steps, expected: Steps) -> None:
    assert (found.first, found.width) == (expected.first, expected.width)
    assert found.counts.tolist() == expected.counts.tolist()
    assert set(found.phase_ms) == set(expected.phase_ms)
    for phase, times in expected.phase_ms.items():
        assert found.phase_ms[phase] == pytest.approx(times), phase
    for name in ("step_ms", "samples_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), nan_ok=True), name


def train(file: Writer, device: SimulatedDevice, num_steps: int, after_flush: Callable[[], None]) -> None:
    """A loop whose host runs ahead of its device, measured by all hooks and flushed every ten steps."""
    clock = SharedClock(device)
    with measured(clock) as recorder:

        def flush() -> None:
            while rows := recorder.log.take_rows(500):
                file.add_steps(rows)
            while (timed := recorder.device.take_rows(500))[1]:
                file.add_device_steps(*timed)
            file.commit()
            after_flush()

        data = SlowData(clock, num_steps, 6 * MS)
        loader = DataLoader(data, batch_size=1, collate_fn=lambda rows: (torch.stack(rows),))
        model = SlowModel(clock, forward_ns=MS, backward_ns=MS)
        optimizer = SlowOptimizer(clock, model, step_ns=MS // 2)
        recorder.looks.cared.append(lambda: recorder.device or follow(recorder, device))
        for step, (rows,) in enumerate(loader):
            optimizer.zero_grad()
            loss = model(rows).sum()
            device.launch(2 * MS)
            loss.backward()
            device.launch((5 + step % 4) * MS)
            optimizer.step()
            if step % 10 == 9:
                flush()
        clock.spend(100 * MS)
        flush()


def test_the_charts_of_a_run_on_a_device_agree_with_its_report(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run", ended_unix=None, exit_code=None, pid=os.getpid())
    ranks = Followed(folder)
    shares: list[float | None] = []

    def look() -> None:
        ranks.find()
        ranks.ask()
        shares.append(drawn(ranks).device_share)

    with contextlib.closing(writer(folder, device="cuda")) as file:
        train(file, SimulatedDevice(), 120, look)
    look()
    while ranks.fill():
        pass
    snapshot = drawn(ranks, State.ENDED)
    assert None not in shares[2:], "from the first steps on"
    assert snapshot.device_share is not None and snapshot.device_share > 0.95
    assert_same(snapshot.overview, of_report(folder))
    by_host = read_rank(folder / "rank0.sqlite").steps
    bins = Bins()
    bins.add_rows(0, by_host)
    of_host = steps_of(bins, rates_of(bins.sums), {})
    assert abs(of_host.step_ms - snapshot.overview.step_ms).max() > 0.5, "the two clocks differ"


def flushes(draw: random.Random, num_steps: int, largest: int) -> list[tuple[int, int]]:
    found, first = [], 0
    while first < num_steps:
        count = min(draw.randint(1, largest), num_steps - first)
        found.append((first, count))
        first += count
    return found


@pytest.mark.parametrize("largest", [4, 60], ids=["merged as they age", "large"])
@pytest.mark.parametrize("looks", ["at each flush", "seldom", "at the end"])
def test_whenever_a_reader_comes_it_ends_with_the_steps_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: str, largest: int
) -> None:
    monkeypatch.setattr("diagnose.dashboards._tailing.PIECE", 7)
    draw = random.Random(1)
    num_steps, holes = 700, {5, 6, 7, 300, *range(402, 440)}
    folder = manifest(tmp_path / "run")
    ranks = Followed(folder)
    told = 1  # the first step is over before the clock is there
    with contextlib.closing(writer(folder, device="cuda")) as file:
        for first, count in flushes(draw, num_steps, largest):
            file.add_steps(steps(first, count, BY_HOST))
            until_step = max(told, first + count - draw.randint(0, 10))  # the device is behind
            if until_step > told:
                file.add_device_steps(told, device_rows(told, until_step - told, list(holes)))
                told = until_step
            file.commit()
            if looks == "at each flush" or (looks == "seldom" and draw.random() < 0.1):
                ranks.find()
                ranks.ask()
                running = drawn(ranks)
                assert running.overview.counts.sum() <= running.num_steps
                if draw.random() < 0.5:
                    ranks.fill()
        assert told < num_steps, "of the last steps the device tells nothing"
    ranks.find()
    while ranks.ask():
        pass
    while ranks.fill():
        pass
    snapshot = drawn(ranks, State.ENDED)
    assert snapshot.device_share == pytest.approx((told - 1 - len(holes)) / num_steps)
    assert_same(snapshot.overview, of_report(folder))
    assert snapshot.recent.counts.sum() == 512
    rows = by_device_clock(read_rank(folder / "rank0.sqlite")).steps[-512:]
    assert snapshot.recent.step_ms == pytest.approx(rows[:, len(COUNTS) :].sum(axis=1) / MS)


def test_steps_that_the_device_has_not_told_of_yet_are_not_drawn_by_the_host(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    with contextlib.closing(writer(folder, device="cuda")) as file:
        file.add_steps(steps(0, 100, BY_HOST))
        file.add_device_steps(1, device_rows(1, 79))
        file.commit()
        ranks = Followed(folder)
        ranks.find()
        ranks.ask()
        running = drawn(ranks)
        assert (running.num_steps, running.overview.counts.sum()) == (100, 80)
        assert running.recent.first + len(running.recent) == 80
        assert drawn(ranks, State.ENDED).overview.counts.sum() == 100
        file.add_device_steps(80, device_rows(80, 20))
        file.commit()
        ranks.ask()
        assert drawn(ranks).overview.counts.sum() == 100
        assert_same(drawn(ranks).overview, of_report(folder))


@pytest.mark.parametrize("gave_up", ["the device has passed no event for too long", ""])
def test_a_clock_that_tells_nothing_more_holds_no_steps_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gave_up: str
) -> None:
    monkeypatch.setattr(_device_steps, "MAX_WAITING", 50)
    folder = manifest(tmp_path / "run")
    with contextlib.closing(writer(folder, device="cuda")) as file:
        file.add_steps(steps(0, 100, BY_HOST))
        file.add_device_steps(0, device_rows(0, 100))
        file.commit()
        ranks = Followed(folder)
        ranks.find()
        ranks.ask()
        file.add_steps(steps(100, 80, BY_HOST))
        file.set_meta({"state": {"facts": {"device_clock": {"gave_up": gave_up}}}})
        file.commit()
        ranks.ask()
        assert drawn(ranks).overview.counts.sum() == (180 if gave_up else 130)
        assert drawn(ranks).device_share == pytest.approx(100 / (180 if gave_up else 130))


def test_a_clock_that_was_heard_in_few_steps_is_not_shown(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    with contextlib.closing(writer(folder, device="cuda")) as file:
        file.add_steps(steps(0, 100, BY_HOST))
        file.add_device_steps(51, device_rows(51, 49))
    with followed(folder) as live:
        snapshot = until(live, lambda now: now.over)
    assert snapshot.device_share is None
    assert snapshot.overview.counts.sum() == 100
    assert np.mean(snapshot.overview.phase_ms[Phase.DATA_WAIT]) == pytest.approx(20, rel=0.05)


def test_damaged_steps_and_rows_cost_only_themselves(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    with contextlib.closing(writer(folder, device="cuda")) as file:
        for first in range(0, 300, 50):
            file.add_steps(steps(first, 50, BY_HOST))
            file.add_device_steps(first, device_rows(first, 50))
        file._db.execute("UPDATE device_chunks SET columns = x'00ff' WHERE first_step = 100")
        file._db.execute("UPDATE chunks SET columns = x'00ff' WHERE first_step = 200")
        file._db.execute("INSERT INTO device_chunks VALUES (100000, 3, x'00')")
        file._db.execute("INSERT INTO device_chunks VALUES (-5, 3, x'00')")
    with followed(folder) as live:
        snapshot = until(live, lambda now: now.over)
    assert snapshot.device_share == pytest.approx(200 / 250)
    assert snapshot.overview.counts.tolist() == [1] * 200 + [0] * 50 + [1] * 50
    assert "50 steps are damaged" in snapshot.notes[0]


def test_a_range_of_steps_is_by_the_same_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_steps, "PIECE", 3)
    folder = manifest(tmp_path / "run")
    with contextlib.closing(writer(folder, device="cuda")) as file:
        for first in range(0, 1000, 40):
            file.add_steps(steps(first, 40, BY_HOST))
        for first in range(0, 990, 30):
            file.add_device_steps(first, device_rows(first, 30))
    rows = by_device_clock(read_rank(folder / "rank0.sqlite")).steps
    with followed(folder) as live:
        until(live, lambda now: now.over)
        for first, last in ((0, 50), (333, 777), (979, 1000)):
            found = live.steps(first, last)
            expected = rows[first:last, len(COUNTS) :].sum(axis=1) / MS
            assert found.step_ms == pytest.approx(expected)
        wide = live.steps(100, 900)
        assert (wide.step_ms * wide.counts).sum() == pytest.approx(rows[100:900, len(COUNTS) :].sum() / MS)


def test_the_charts_say_whose_clock_they_show(tmp_path: Path) -> None:
    assert "By the device's clock in 99 % of the steps" in to_json(legend(Steps(), 0.99))
    assert "clock" not in to_json(legend(Steps()))
