"""A run that is exported while it goes on: looks that add up, and destinations that fail."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diagnose.cli.main import main
from diagnose.core.phases import Phase
from diagnose.core.profile import RunInfo
from diagnose.export import _follower, _live
from diagnose.export._follower import Follower
from diagnose.export._live import follow_run
from diagnose.export._reading import Reading
from diagnose.export.base import Destination, Exporter, Write
from diagnose.store.tail import Chunk, Look
from tests.exported import assert_chrome_trace, parsed, read, recorded_run
from tests.recorded import BATCH, manifest, record, steps, writer
from tests.running import DIAGNOSE, run, write


def test_looks_add_up_to_the_run(tmp_path):
    folder = manifest(tmp_path / "run", ended_unix=None)
    follower = Follower(folder)
    assert follower.look(is_last=False).ranks == ()
    file = writer(folder)
    seen: list[int] = []
    before = dict.fromkeys(Phase, 0.0)
    for first in range(0, 100, 25):
        file.add_steps(steps(first, 25))
        file.commit()
        reading = follower.look(is_last=first == 75)
        [rank] = reading.ranks
        seen += [point.step for point in reading.points]
        assert rank.num_steps == first + 25 and rank.samples == rank.num_steps * BATCH
        assert all(rank.phase_ns[phase] >= before[phase] for phase in Phase), "a counter never falls"
        before = dict(rank.phase_ns)
    file.close()
    assert seen == list(range(100))
    assert reading.profile.steps.count == 100 and reading.is_last
    recorded_ns = sum(sum(row[5:]) for first in range(0, 100, 25) for row in steps(first, 25))
    assert sum(before.values()) == pytest.approx(recorded_ns)
    assert follower.look(is_last=True).points == ()


def test_points_of_a_long_run_are_means_of_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(_follower, "MAX_POINTS", 10)
    for one_by_one in (100_000, 0):
        monkeypatch.setattr(_follower, "ONE_BY_ONE", one_by_one)
        folder = recorded_run(tmp_path / str(one_by_one), 600, per_flush=20)
        points = read(folder).points
        assert len(points) == 10 and points[-1].step == 599
        assert points[3].step_ms == pytest.approx(38, rel=0.1)
        assert points[3].samples_per_s == pytest.approx(BATCH / 0.038, rel=0.1)


def test_one_destination_that_fails_is_said_once_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    folder = recorded_run(tmp_path / "run")
    looks = iter([False, False, True])
    monkeypatch.setattr(_live, "_ends_within", lambda folder: lambda seconds: next(looks))
    gone, good = tmp_path / "gone" / "x.prom", tmp_path / "x.prom"
    monkeypatch.setattr(os, "nice", lambda by: 0)
    assert not follow_run(
        folder,
        [Destination(name="prometheus", target=str(path)) for path in (gone, good)],
        till_stdin_closes=False,
    )
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"export: prometheus failed: export to prometheus: cannot write {gone}: No such file or directory.",
        f"prometheus: wrote {good}",
    ]
    assert parsed(good.read_text())["diagnose_run_active"] == {(("run", "run"),): 0.0}


def test_after_a_restart_points_are_of_the_newest_attempt(tmp_path):
    follower = Follower(recorded_run(tmp_path / "run"))
    assert len(follower.look(is_last=False).points) == 60
    record(tmp_path / "run", 40, restart=1)
    reading = follower.look(is_last=True)
    assert [(rank.name, rank.num_steps) for rank in reading.ranks] == [("0", 40)]
    assert len(reading.points) == 40


def test_where_nothing_can_be_written_is_said_before_a_run_is_followed(tmp_path, monkeypatch, capsys):
    recorded_run(tmp_path / "run")
    nowhere = f"prometheus={tmp_path / 'gone' / 'x.prom'}"
    words = ["diagnose", "export", "run", "--follow", "--to", nowhere, "--run-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "is no folder that takes files" in capsys.readouterr().err


class Memory(Exporter):
    """Takes points, but not at every call.

    Args:
        fails_at: The calls of `write` that raise.
    """

    target = "NOWHERE"

    def __init__(self, *fails_at: int) -> None:
        self.steps: list[int] = []
        self.is_complete = False
        self._fails_at, self._calls = fails_at, 0

    def default_target(self, run: RunInfo) -> str:
        return ""

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        yield self.write
        self.is_complete = True  # which it is not where the garbage collector closes it

    def write(self, reading: Reading) -> str:
        self._calls += 1
        if self._calls in self._fails_at:
            raise ConnectionError("no route to the host")
        self.steps += [point.step for point in reading.points]
        return "taken"


def followed(folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Exports a run of a hundred steps that grows by a quarter before each look; says whether all came."""
    file, quarters = writer(manifest(folder, ended_unix=None)), iter(range(0, 100, 25))

    def over(seconds: float) -> bool:
        first = next(quarters)
        file.add_steps(steps(first, 25))
        file.commit()
        return first == 75

    monkeypatch.setattr(_live, "_ends_within", lambda folder: over)
    monkeypatch.setattr(os, "nice", lambda by: 0)
    monkeypatch.setattr(Destination, "exporter", lambda self: memory)
    try:
        return follow_run(folder, [Destination(name="memory")], till_stdin_closes=False)
    finally:
        file.close()


@pytest.mark.parametrize("fails_at", [(), (1,), (2, 3)])
def test_points_that_were_not_taken_come_before_the_next(fails_at, tmp_path, monkeypatch, capsys):
    memory = Memory(*fails_at)
    assert followed(tmp_path / "run", memory, monkeypatch)
    assert memory.steps == list(range(100)) and memory.is_complete
    assert capsys.readouterr().err.splitlines()[-1] == "memory: taken"


def test_of_points_that_nobody_takes_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(_live, "MAX_KEPT", 30)
    memory = Memory(1, 2, 3)
    followed(tmp_path / "run", memory, monkeypatch)
    assert memory.steps == list(range(70, 100))


def test_what_fails_at_the_end_is_closed_all_the_same(tmp_path, monkeypatch, capsys):
    memory = Memory(4)
    assert not followed(tmp_path / "run", memory, monkeypatch)
    assert memory.steps == list(range(75)) and memory.is_complete
    assert capsys.readouterr().err.splitlines()[-1] == (
        "export: memory failed: ConnectionError: no route to the host"
    )


def test_a_run_that_cannot_be_read_at_the_end_is_closed_all_the_same(tmp_path, monkeypatch, capsys):
    look = Follower.look

    def torn(follower: Follower, *, is_last: bool) -> Reading:
        if is_last:
            raise OSError("the disk is gone")
        return look(follower, is_last=is_last)

    monkeypatch.setattr(Follower, "look", torn)
    memory = Memory()
    assert not followed(tmp_path / "run", memory, monkeypatch)
    assert memory.steps == list(range(75)) and memory.is_complete
    assert capsys.readouterr().err.splitlines()[-1] == (
        "export: the run could not be read: OSError: the disk is gone"
    )


def test_a_look_that_breaks_off_counts_what_it_has_read(tmp_path, monkeypatch):
    chunks_after, calls = Look.chunks_after, []

    def breaks_off(file: Look, step: int) -> list[Chunk]:
        calls.append(step)
        if len(calls) == 2:
            raise sqlite3.OperationalError("disk I/O error")
        return chunks_after(file, step, 2)

    monkeypatch.setattr(_follower, "MAX_CHUNKS", 2)
    monkeypatch.setattr(Look, "chunks_after", breaks_off)
    follower = Follower(recorded_run(tmp_path / "run", 100, per_flush=20))
    seen: list[int] = []
    for count in (40, 100):
        reading = follower.look(is_last=False)
        [rank] = reading.ranks
        seen += [point.step for point in reading.points]
        assert (rank.num_steps, rank.samples) == (count, count * BATCH)
    assert seen == list(range(100))
    recorded_ns = sum(sum(row[5:]) for first in range(0, 100, 20) for row in steps(first, 20))
    assert sum(rank.phase_ns.values()) == pytest.approx(recorded_ns)


TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float("nan"))
for _ in range(30):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.extended
def test_a_run_is_exported_when_its_script_has_ended(tmp_path):
    script = write(tmp_path / "train.py", TRAINS + "raise SystemExit(3)")
    exports = ("--export", "prometheus=run.prom", "--export", "perfetto=trace.json")
    ended = run(*DIAGNOSE, *exports, script, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (3, "trained\n")
    assert ended.stderr.splitlines()[-2:] == [
        "diagnose: prometheus: wrote run.prom",
        "diagnose: perfetto: wrote trace.json: open it in https://ui.perfetto.dev "
        "(nothing is uploaded there)",
    ]
    series = parsed((tmp_path / "run.prom").read_text())
    assert list(series["diagnose_steps_total"].values()) == [30]
    assert 'status="script_failed"' in (tmp_path / "run.prom").read_text()
    assert_chrome_trace(json.loads((tmp_path / "trace.json").read_text()))
