"""The runs that the dashboard lists and opens, and the files that it does not."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from diagnose.dashboards import _run_list
from diagnose.dashboards._listed import ListedRun, RunRow
from diagnose.dashboards._source import Source
from diagnose.dashboards.runs import filtered

from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import State
from tests.following import WAIT_S, until
from tests.recorded import manifest, record, steps, writer
from tests.running import comes_true

GOES_ON = {"started_unix": time.time(), "ended_unix": None, "exit_code": None}


def listed(source: Source, holds: Callable[[tuple[RunRow, ...]], bool] = bool) -> tuple[RunRow, ...]:
    """Returns the rows once each has been read, and this holds of them."""
    end = time.monotonic() + WAIT_S
    while True:
        rows = source.runs()
        if all(row.is_read for row in rows) and holds(rows):
            return rows
        assert time.monotonic() < end, [(row.id, row.words, row.samples_per_s) for row in rows]
        time.sleep(0.02)


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
    with closing(Source(tmp_path / "runs")) as source:
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


@pytest.mark.parametrize(
    "kept",
    ["some", "none", *(pytest.param(each, marks=pytest.mark.extended) for each in ("all", "no table"))],
)
def test_the_source_that_is_shown_is_that_which_ran(tmp_path: Path, kept: str) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"import torch\n\x0c\r\nslow()\r\nfast()\n")
    folder = manifest(tmp_path / "runs" / "run")
    first = writer(folder)
    first.add_steps(steps(0, 400))
    first.add_samples(0, [(0, [("", 0, ""), (str(script), 3, "main")], 1_000_000_000)])
    first.close()
    second = writer(folder, rank=1)
    second.add_sources([str(script)])
    second.close()
    for rank in {"all": (), "some": (0,)}.get(kept, (0, 1)):
        with closing(sqlite3.connect(folder / f"rank{rank}.sqlite")) as db, db:
            db.execute("DROP TABLE sources" if kept == "no table" else "DELETE FROM sources")
    script.write_text("import math\n" + script.read_text())
    with closing(Source(tmp_path / "runs")) as source:
        until(source.run("run"), lambda now: now.profile is not None)
        shown = source.source_lines("run", str(script), 3)
        script.unlink()
        assert bool(source.source_lines("run", str(script), 3)) == (kept in ("all", "some"))
    ran = ["import torch", "\x0c", "slow()", "fast()"]
    assert [text for _, text in shown] == (ran if kept in ("all", "some") else ["import math", *ran])
    assert [number for number, _ in shown] == list(range(1, len(shown) + 1))


def test_the_list_tells_what_is_known_without_reading_every_step(tmp_path: Path) -> None:
    record(manifest(tmp_path / "good", started_unix=1.0), 400)
    manifest(tmp_path / "empty", started_unix=2.0, exit_code=1)
    (manifest(tmp_path / "bad", started_unix=3.0) / "rank0.sqlite").write_bytes(b"no database" * 100)
    with closing(Source(tmp_path)) as source:
        rows = {row.id: row for row in listed(source)}
    assert list(rows) == ["bad", "empty", "good"]
    assert (rows["good"].num_steps, rows["good"].words) == (400, "ended (ok)")
    assert rows["good"].step_ms == pytest.approx(38.2, abs=0.5)
    assert rows["good"].samples_per_s == pytest.approx(32 / 0.0382, rel=0.02)
    assert (rows["empty"].num_steps, rows["empty"].step_ms) == (0, None)
    assert rows["bad"].note


def test_the_runs_that_went_wrong_are_found_and_no_others(tmp_path: Path) -> None:
    record(manifest(tmp_path / "good", started_unix=1.0), 40)
    record(manifest(tmp_path / "attached", started_unix=2.0, exit_code=None, ended_unix=None), 40)
    record(manifest(tmp_path / "crashed", started_unix=3.0, exit_code=1), 40)
    record(manifest(tmp_path / "killed", started_unix=4.0, exit_code=None, signal=9), 40)
    record(manifest(tmp_path / "raised", started_unix=5.0, exit_code=None), 40, error="ValueError")
    writer(manifest(tmp_path / "left", started_unix=6.0, exit_code=None, ended_unix=None)).close()
    with closing(Source(tmp_path)) as source:
        rows = listed(source)
    assert [row.id for row in filtered(rows, "failed", "")] == ["left", "raised", "killed", "crashed"]
    assert [row.id for row in filtered(rows, "ended", "")] == [
        *("raised", "killed", "crashed", "attached", "good")
    ]


def test_ranks_are_counted_before_their_files_are_read_and_summed_up_afterwards(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    for rank in range(3):
        record(folder, 400, rank=rank, slots_ms={"forward": 10.0 * (rank + 1)})
    run = ListedRun(folder)
    run.look_at_manifest()
    run.look()
    first = run.row
    assert first.samples_per_s is not None
    assert (first.world_size, first.num_steps) == (3, 400)
    assert first.samples_per_s == pytest.approx(3 * 32 / 0.010, rel=0.02), "the others count as the first"
    run.look_at_others(until=float("inf"))
    assert run.row.samples_per_s == pytest.approx(32 / 0.010 + 32 / 0.020 + 32 / 0.030, rel=0.02)
    assert not run.has_unread


def test_a_run_whose_first_rank_is_gone_goes_on_while_another_does(tmp_path: Path) -> None:
    here: dict[str, Any] = {"host": socket.gethostname()}
    folder = manifest(tmp_path / "run", **here, **GOES_ON)
    writers = [writer(folder, 0, **here), writer(folder, 1, **{**here, "pid": os.getpid()})]
    run = ListedRun(folder)
    run.look_at_manifest()
    run.look()
    assert run.row.state is State.RUNNING
    run.look_at_others(until=float("inf"))
    run.look()
    assert run.row.state is State.RUNNING
    for each in writers:
        each.close()


def test_a_run_that_comes_ends_or_is_deleted_is_so_in_the_list(tmp_path: Path) -> None:
    source = Source(tmp_path)
    quickly = patch.object(_run_list, "LIST_EVERY_S", 0.05)
    quickly.start()
    try:
        assert source.runs() == ()
        here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
        folder = manifest(tmp_path / "new", **here, **GOES_ON)
        file = writer(folder, **here)
        rows = listed(source)
        assert rows[0].words == "running, no record yet"
        file.add_steps(steps(0, 40))
        file.commit()
        listed(source, lambda rows: rows[0].num_steps == 40)
        file.close()
        manifest(folder, **here, exit_code=3)
        listed(source, lambda rows: rows[0].words == "ended (exit 3)")
        shutil.rmtree(folder)
        assert comes_true(lambda: source.runs() == ())
    finally:
        quickly.stop()
        source.close()
