"""What is written of a run is read again: whole, torn, from a full disk, and by the million."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.places import coded
from diagnose.store import reader as reader_module
from diagnose.store import writer as writer_module
from diagnose.store.format import VERSION
from diagnose.store.reader import RankLog, read_rank
from diagnose.store.runs import check_name, list_runs, rank_files, read_manifest, resolve_run
from diagnose.store.tail import look
from diagnose.store.writer import Writer
from tests.running import DIAGNOSE, REPOSITORY, environment, only_run, run, write

STACK = [("", 0, ""), ("/home/me/train.py", 12, "main"), ("/home/me/train.py", 40, "<module>")]

WORKER = {
    "pid": 7,
    "worker": 0,
    "batches": 2,
    "fetch_ns": 100,
    "collate_ns": 10,
    "cpu_ns": 50,
    "rest_cpu_ns": 5,
    "life_ns": 1000,
}


def rows(first: int, count: int) -> list[tuple[int, ...]]:
    """Steps that hold the number of each in every column."""
    return [
        tuple(1000 * step + column for column in range(len(COLUMNS)))
        for step in range(first, first + count)
    ]


def whole_file(folder: Path) -> Path:
    """A file that holds something of everything."""
    writer = Writer(folder, 0)
    for first in range(0, 1000, 100):
        writer.add_steps(rows(first, 100))
        writer.add_samples(first, [(2, [("", 0, ""), (f"/home/me/{first}.py", 1, "f")], 5), (3, STACK, 7)])
        writer.commit()
    writer.add_sites([("forward", "/home/me/train.py", 12, "main", 900)])
    writer.add_sites([("forward", "/home/me/train.py", 12, "main", 1000)])
    writer.add_events([(123, 4, "checkpoint", {}), (456, 5, "gc", {"collected": 6})])
    writer.add_worker({"stacks": [[STACK, 3]], **WORKER, "batches": 1})
    writer.add_worker({"stacks": [[STACK, 4]], **WORKER})
    writer.set_meta({"rank": 0, "host": "here"})
    writer.set_meta({"state": {"steps": 1000, "finished": True}})
    writer.close()
    return writer.path


def test_what_was_written_is_read(tmp_path):
    path = whole_file(tmp_path)
    log = read_rank(path)
    stack = tuple(STACK)
    assert path == tmp_path / "rank0.sqlite"
    assert log.steps.dtype == np.int64
    assert log.steps.tolist() == [list(row) for row in rows(0, 1000)]
    assert log.samples[:2] == [(0, 2, (("", 0, ""), ("/home/me/0.py", 1, "f")), 5), (0, 3, stack, 7)]
    assert len(log.samples) == 20
    assert log.sites == [("forward", "/home/me/train.py", 12, "main", 1000)], "totals replace earlier ones"
    assert log.events == [(123, 4, "checkpoint", {}), (456, 5, "gc", {"collected": 6})]
    assert log.workers == [WORKER], "totals replace earlier ones"
    assert log.worker_samples == [(stack, 7)], "samples add up"
    assert log.meta == {"rank": 0, "host": "here", "steps": 1000, "finished": True}
    assert log.notes == []


def test_a_file_is_read_while_it_is_being_written(tmp_path):
    writer = Writer(tmp_path, 3)
    writer.add_steps(rows(0, 10))
    writer.commit()
    writer.add_steps(rows(10, 10))
    assert len(read_rank(writer.path).steps) == 10, "what is not committed is not there"
    writer.commit()
    assert len(read_rank(writer.path).steps) == 20
    writer.close()


def test_what_is_written_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    writer, steps = Writer(tmp_path, 0), reader_module._steps
    writer.add_samples(0, [(2, STACK, 5)])
    writer.commit()

    def meanwhile(chunks: Any) -> Any:
        writer.add_samples(0, [(2, [("/home/me/new.py", 1, "f")], 6)])
        writer.commit()
        return steps(chunks)

    monkeypatch.setattr(reader_module, "_steps", meanwhile)
    log = read_rank(writer.path)
    writer.close()
    assert [(frames[0][0], weight) for _, _, frames, weight in log.samples] == [
        ("", 5),
        ("/home/me/new.py", 6),
    ]
    assert log.notes == []


def test_no_steps_make_no_chunk(tmp_path):
    writer = Writer(tmp_path, 0)
    writer.add_steps([])
    writer.close()
    log = read_rank(writer.path)
    assert log.steps.shape == (0, len(COLUMNS))
    assert log.notes == []


@pytest.mark.parametrize(
    "name", ["läufe", "日本 語", "100% sure?", "a#b&c=d", "it's", "back\\slash", "\udcff"]
)
def test_a_run_can_lie_in_a_folder_of_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    path = whole_file(folder)
    assert len(read_rank(path).steps) == 1000
    assert path.parent == folder
    assert load_profile(folder).steps.count == 1000


# -- several processes


def test_a_source_file_can_have_any_name_that_a_file_has(tmp_path):
    file = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")
    try:
        write(Path(file), "slow()\r\n")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    writer = Writer(tmp_path, 0)
    writer.add_steps(rows(0, 30))
    writer.add_samples(0, [(2, [("", 0, ""), (file, 1, "f")], 5)])
    writer.add_sites([("forward", file, 1, "main", 9)])
    writer.add_sites([("forward", file, 1, "main", 10)])
    writer.close()
    log = read_rank(writer.path)
    assert log.sites == [("forward", file, 1, "main", 10)] and log.sources == {file: "slow()\n"}
    assert log.samples == [(0, 2, (("", 0, ""), (file, 1, "f")), 5)] and not log.notes
    with look(writer.path) as opened:
        assert opened.source(file) == "slow()\n" and opened.source("/other.py") is None
        assert opened.damaged == []


SLOW = """
import time
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def collate(rows):
    time.sleep(0.004)
    return torch.ones(3, 2)
for batch in torch.utils.data.DataLoader([1.0] * 180, batch_size=3, collate_fn=collate):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def test_a_script_in_a_folder_of_any_name_is_measured_and_reported(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    script = write(folder / "train.py", SLOW)
    ended = run(*DIAGNOSE, "--html", "a.html", "--json", "a.json", script, cwd=tmp_path)
    assert ended.code == 0 and "error of our own" not in ended.stderr, ended.stderr
    assert "60 steps" in ended.stderr and "caf\\udce9/train.py:7" in ended.stderr
    assert str(script) in read_rank(only_run(tmp_path) / "rank0.sqlite").sources
    assert "caf\\udce9/train.py:7" in (tmp_path / "a.html").read_text()
    assert str(script) in {line["file"] for line in json.loads((tmp_path / "a.json").read_text())["where"]}
    command = [sys.executable, "-m", "diagnose", "report", "--md", "a.md"]
    assert run(*command, cwd=tmp_path).code == 0
    assert "caf\\udce9/train.py:7" in (tmp_path / "a.md").read_text()


def test_a_second_process_of_the_same_rank_gets_a_file_of_its_own(tmp_path):
    first = Writer(tmp_path, 0)
    second = Writer(tmp_path, 0)
    first.add_steps(rows(0, 10))
    second.add_steps(rows(0, 20))
    first.close()
    second.close()
    assert second.path.name == f"rank0.{os.getpid()}.sqlite"
    assert [len(read_rank(path).steps) for path in rank_files(tmp_path)] == [10, 20]


def test_a_process_that_executes_itself_anew_twice_keeps_the_records_of_all_three(tmp_path):
    """Its number stays the same, and nobody closes the files."""
    writers = [Writer(tmp_path, 0) for _ in range(3)]
    for number, writer in enumerate(writers, 1):
        writer.add_steps(rows(0, number))
        writer.commit()
    assert [len(read_rank(path).steps) for path in rank_files(tmp_path)] == [1, 2, 3]


def test_processes_that_begin_at_the_same_instant_get_a_file_each(tmp_path):
    write(
        tmp_path / "job.py",
        """
import sys, time
from pathlib import Path
from diagnose.core.ledger import COLUMNS
from diagnose.store.writer import Writer
print("ready", flush=True)
time.sleep(max(0.0, float(sys.stdin.readline()) - time.time()))
writer = Writer(Path("run"), 0)
writer.add_steps([(1,) * len(COLUMNS)])
writer.close()
""",
    )
    (tmp_path / "run").mkdir()
    jobs = [
        subprocess.Popen(
            [sys.executable, "job.py"],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for job in jobs:
        assert job.stdout is not None
        job.stdout.readline()
    at = f"{time.time() + 0.5}\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write(at)
        job.stdin.flush()
    ends = [job.communicate(timeout=60) for job in jobs]
    assert [stderr for _, stderr in ends] == [""] * 6
    files = rank_files(tmp_path / "run")
    assert len(files) == 6
    assert [len(read_rank(path).steps) for path in files] == [1] * 6


def test_files_are_read_in_the_order_of_their_ranks(tmp_path):
    for name in ("rank10.sqlite", "rank2.sqlite", "rank0.sqlite", "rank0.77.sqlite", "rank1.sqlite-wal"):
        (tmp_path / name).touch()
    names = [path.name for path in rank_files(tmp_path)]
    assert names == ["rank0.sqlite", "rank0.77.sqlite", "rank2.sqlite", "rank10.sqlite"]


# -- what goes wrong


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


@pytest.mark.parametrize("after_s", [0.3, pytest.param(1.4, marks=pytest.mark.extended), 1.8])
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


# -- a long run


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of a million steps with times as noisy as real ones."""
    folder = tmp_path_factory.mktemp("million")
    rng = np.random.default_rng(0)
    writer = Writer(folder, 0)
    slots = [COLUMNS.index(name) for name in ("data_wait", "forward", "backward", "optimizer")]
    gaps = [
        COLUMNS.index(f"gap_after_{name}") for name in ("data_wait", "forward", "backward", "optimizer")
    ]
    for _ in range(0, 1_000_000, 500):
        steps = np.zeros((500, len(COLUMNS)), dtype=np.int64)
        steps[:, slots] = rng.gamma(20, 50_000, (500, 4))
        steps[:, gaps] = rng.gamma(5, 2_000, (500, 4))
        steps[:, COLUMNS.index("samples")] = 32
        steps[:, COLUMNS.index("spans")] = 6
        steps[:, 0] = steps.sum(axis=1).cumsum()
        writer.add_steps(list(map(tuple, steps.tolist())))
    for first in range(0, 1_000_000, 500):
        places = rng.integers(1, 60, 12).tolist()
        codes = [coded(slot, place) for slot, place in enumerate(places)]
        writer.add_samples(first, [(code, STACK, 3_000_000) for code in codes])
    writer.set_meta({"state": {"steps": 1_000_000, "finished": True, "samples": 24_000}})
    writer.close()
    yield folder


def test_a_million_steps_take_less_than_100_megabytes(million):
    assert sum(path.stat().st_size for path in million.iterdir()) < 100e6


def test_a_million_steps_are_read_and_analysed_in_few_times_what_unpacking_them_takes(million):
    """Nine to twelve times here: 2 s, of which unpacking takes 0.2 s."""
    with sqlite3.connect(million / "rank0.sqlite") as db:
        blobs = [blob for (blob,) in db.execute("SELECT columns FROM chunks")]
    begun = time.process_time()
    for blob in blobs:
        zlib.decompress(blob)
    unpacked = time.process_time()
    profile = load_profile(million)
    assert time.process_time() - unpacked < 25 * (unpacked - begun)
    assert profile.steps.count == 1_000_000
    assert profile.phase_time_ns[Phase.FORWARD] == pytest.approx(1e6, rel=0.05)


@pytest.mark.extended
def test_the_memory_of_a_process_does_not_grow_with_its_steps(tmp_path):
    write(
        tmp_path / "job.py",
        """
import time, torch, diagnose
from diagnose.launch import session
def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
diagnose.attach("run")
unread = session._session._recorder.log
def mark(steps):
    for _ in range(steps // 1000):
        for _ in range(1000):
            diagnose.step()
        while len(unread._closed) > 50_000:  # as fast as no real loop: the flusher comes first
            time.sleep(0.01)
mark(100_000)
time.sleep(0.6)
before = resident_bytes()
mark(250_000)
print(resident_bytes() - before)
""",
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert ended.stderr == ""
    assert int(ended.stdout) < 50e6
    assert load_profile(tmp_path / "run").steps.count >= 349_999


# -- names of runs


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "a b", "a\n", "é", "x" * 129, "\0"]
)
def test_what_is_no_name_of_a_run_is_refused(name):
    with pytest.raises(DiagnoseError, match="cannot name a run"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "0", "2026-11-21_train.py-3", "x" * 128])
def test_a_name_of_letters_digits_and_a_few_signs_is_one(name):
    assert check_name(name) == name


def manifest(root: Path, name: str, text: str) -> Path:
    return write(root / name / "run.json", text).parent


def test_runs_are_listed_newest_first_and_what_is_no_run_is_not(tmp_path):
    manifest(tmp_path, "old", '{"started_unix": 1}')
    manifest(tmp_path, "new", '{"started_unix": 3}')
    manifest(tmp_path, "torn", '{"started_unix": ')
    manifest(tmp_path, "between", '{"started_unix": 2}')
    manifest(tmp_path, "no name", '{"started_unix": 4}')
    (tmp_path / "empty").mkdir()
    assert [path.name for path in list_runs(tmp_path)] == ["new", "between", "old", "torn"]
    assert read_manifest(tmp_path / "torn") == {}
    assert resolve_run(None, tmp_path).name == "new"
    assert resolve_run("old", tmp_path).name == "old"
    assert resolve_run(str(tmp_path / "old"), tmp_path / "elsewhere").name == "old"


@pytest.mark.parametrize(
    "name, message",
    [
        (None, "there are no runs under ROOT.\nRecord one: diagnose run train.py"),
        ("absent", "there is no run 'absent' under ROOT.\nList them: diagnose runs"),
        ("ROOT/absent", "ROOT/absent is not a run: it holds no run.json.\nList them: diagnose runs"),
    ],
)
def test_a_run_that_is_not_there_is_said_to_be_missing_and_where(tmp_path, name, message):
    root = tmp_path / "runs"
    with pytest.raises(DiagnoseError) as error:
        resolve_run(name and name.replace("ROOT", str(root)), root)
    assert str(error.value) == message.replace("ROOT", str(root))
