"""A run that was damaged, cut short or met a full disk: what can be read is read, and the rest is said."""

from __future__ import annotations

import random
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.errors import DiagnoseError
from diagnose.store import writer as writer_module
from diagnose.store.format import VERSION
from diagnose.store.reader import RankLog, read_rank
from diagnose.store.runs import rank_files
from diagnose.store.writer import Writer
from tests.running import REPOSITORY, run, write
from tests.stored import rows, whole_file


def test_a_newer_format_is_refused_with_what_to_do(tmp_path):
    path = whole_file(tmp_path)
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()
    with pytest.raises(DiagnoseError) as error:
        read_rank(path)
    assert str(error.value) == (
        f"rank0.sqlite: written by a newer diagnose: format {VERSION + 1}, not {VERSION}.\n"
        "Upgrade: pip install --upgrade torch-diagnose"
    )


def is_part_of_what_was_written(log: RankLog) -> bool:
    """Whether every step that was read is one of `whole_file`'s, in its place."""
    steps = log.steps[:, 0] // 1000
    expected = np.array(rows(0, 1000))[steps]
    return bool((log.steps == expected).all() and (np.diff(steps) > 0).all())


def test_a_file_cut_short_anywhere_gives_what_can_be_read_and_a_note(tmp_path):
    path = whole_file(tmp_path)
    content = path.read_bytes()
    lengths = {*range(0, 600, 37), *range(0, len(content), 1111), *range(0, len(content), 4096)}
    some_steps = 0
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        log = read_rank(path)
        assert log.notes, length
        assert all(note.startswith("rank0.sqlite: ") for note in log.notes)
        assert is_part_of_what_was_written(log)
        some_steps += 0 < len(log.steps) < 1000
        profile = load_profile(tmp_path)
        assert profile.steps.count == len(log.steps)
    assert some_steps, "from some of the files part of the steps could be read"


def test_a_file_with_a_page_of_zeros_or_noise_gives_what_can_be_read_and_a_note(tmp_path):
    path = whole_file(tmp_path)
    content = path.read_bytes()
    random.seed(0)
    for first in range(0, len(content), 4096):
        for junk in (bytes(4096), random.randbytes(4096)):
            path.write_bytes(content[:first] + junk + content[first + 4096 :])
            log = read_rank(path)
            assert is_part_of_what_was_written(log)
            load_profile(tmp_path)


def test_bytes_that_were_flipped_never_stop_the_reading(tmp_path):
    path = whole_file(tmp_path)
    content = path.read_bytes()
    random.seed(1)
    for _ in range(150):
        torn = bytearray(content)
        for _ in range(20):
            torn[random.randrange(100, len(torn))] ^= 1 << random.randrange(8)
        path.write_bytes(torn)
        read_rank(path)


def test_a_write_ahead_log_cut_short_anywhere_loses_the_last_commits_alone(tmp_path):
    writer = Writer(tmp_path, 0)
    for first in range(0, 500, 50):
        writer.add_steps(rows(first, 50))
        writer.commit()
    folder = tmp_path / "copy"
    folder.mkdir()
    main, log = writer.path.read_bytes(), Path(f"{writer.path}-wal").read_bytes()
    writer.close()
    seen = set()
    for length in range(0, len(log) + 1, 1777):
        (folder / "rank0.sqlite").write_bytes(main)
        (folder / "rank0.sqlite-wal").write_bytes(log[:length])
        read = read_rank(folder / "rank0.sqlite")
        assert len(read.steps) % 50 == 0
        assert is_part_of_what_was_written(read)
        seen.add(len(read.steps))
        for path in folder.iterdir():
            path.unlink()
    assert len(seen) > 5


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"no database at all " * 500])
def test_a_file_that_is_no_database_is_named_and_the_others_are_read(tmp_path, content):
    writer = Writer(tmp_path, 1)
    writer.add_steps(rows(0, 30))
    writer.close()
    (tmp_path / "rank0.sqlite").write_bytes(content)
    profile = load_profile(tmp_path)
    assert profile.steps.count == 30
    assert any(note.startswith("rank0.sqlite") for note in profile.notes)


def test_a_run_without_any_file_has_no_steps(tmp_path):
    assert load_profile(tmp_path).status == "no_steps"


class WithoutWal(sqlite3.Connection):
    """A file system on which the first real write under a write-ahead log fails, as NFS does."""

    wal = False

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA journal_mode="):
            self.wal = sql.endswith("wal")
        return super().execute(sql, *args)

    def executescript(self, sql: str) -> sqlite3.Cursor:
        if self.wal:
            raise sqlite3.OperationalError("locking protocol")
        return super().executescript(sql)


class WalRefused(sqlite3.Connection):
    """A file system of which SQLite itself knows that a write-ahead log does not work there."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("journal_mode=wal", "journal_mode=delete"), *args)


@pytest.mark.parametrize("connection", [WithoutWal, WalRefused])
def test_where_a_write_ahead_log_fails_another_journal_serves_and_the_report_says_so(
    tmp_path, monkeypatch, connection
):
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(
            writer_module.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=connection)
        )
        writer = Writer(tmp_path, 0)
        writer.set_meta({"journal": writer.journal})
        writer.add_steps(rows(0, 30))
        writer.commit()
    assert writer.journal == "delete"
    assert not Path(f"{writer.path}-wal").exists()
    assert len(read_rank(writer.path).steps) == 30
    writer.close()
    assert load_profile(tmp_path).notes == (
        "rank0.sqlite: this file system has no write-ahead log; it was written without one.",
    )


def test_without_a_write_ahead_log_somebody_who_reads_for_long_costs_no_record(tmp_path, monkeypatch):
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(
            writer_module.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=WalRefused)
        )
        writer = Writer(tmp_path, 0)
    writer._db.execute("PRAGMA busy_timeout=1")
    for first in (0, 30):
        writer.add_steps(rows(first, 30))
    writer.commit()
    reader = sqlite3.connect(writer.path)
    reading = reader.execute("SELECT * FROM chunks")
    reading.fetchone()
    writer.add_steps(rows(60, 30))
    writer.commit()
    assert writer.safe_steps == 60
    reading.close()
    reader.close()
    writer.commit()
    assert writer.safe_steps == 90
    writer.close()
    assert len(read_rank(writer.path).steps) == 90


def test_a_folder_that_cannot_be_written_is_an_error_of_its_own(tmp_path):
    with pytest.raises((OSError, sqlite3.Error)):
        Writer(tmp_path / "missing", 0)


TRAINS = """
import os, sys, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(seconds):
    end = time.perf_counter() + seconds
    steps = 0
    while time.perf_counter() < end:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        steps += 1
        time.sleep(0.005)
    return steps
"""


def test_a_full_disk_ends_the_recording_and_not_the_script(tmp_path):
    write(
        tmp_path / "job.py",
        f"""{TRAINS}
import diagnose, sqlite3
connect = sqlite3.connect
class Full(sqlite3.Connection):
    def executescript(self, sql):
        super().executescript(sql)
        self.execute("PRAGMA max_page_count=20")
sqlite3.connect = lambda *args, **options: connect(*args, **options, factory=Full)
diagnose.attach("run")
train(1.2)
for _ in range(40_000):
    diagnose.step()
print(train(1.2) > 20)
""",
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert (ended.code, ended.stdout) == (0, "True\n")
    assert re.fullmatch(
        r"diagnose: database or disk is full; records after step \d+ are lost\.\n", ended.stderr
    )
    assert load_profile(tmp_path / "run").steps.count > 20


@pytest.mark.parametrize(
    "after_s", [0.3, *(pytest.param(late, marks=pytest.mark.extended) for late in (1.4, 1.8))]
)
def test_a_kill_costs_at_most_the_last_half_second(tmp_path, after_s):
    write(
        tmp_path / "job.py",
        f"""{TRAINS}
train({after_s})
print(time.perf_counter_ns(), flush=True)
os.kill(os.getpid(), 9)
""",
    )
    (tmp_path / "run").mkdir()
    boot = REPOSITORY / "diagnose" / "launch" / "boot"
    ended = run(
        sys.executable, "job.py", cwd=tmp_path, PYTHONPATH=f"{boot}", DIAGNOSE_RUN=str(tmp_path / "run")
    )
    assert ended.code == -9
    killed_ns = int(ended.stdout)
    files = rank_files(tmp_path / "run")
    if after_s < 0.5:
        assert files == [], "the first half second was not over"
        return
    (path,) = files
    log = read_rank(path)
    assert log.notes == []
    assert not log.meta["finished"]
    busy_machine_s = 0.4
    assert (killed_ns - log.steps[-1, 0]) / 1e9 < 0.5 + busy_machine_s
