"""What is written of a run is read again: as it was, by many processes, and by the million."""

from __future__ import annotations

import json
import os
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
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.places import coded
from diagnose.store import reader as reader_module
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from diagnose.store.tail import look
from diagnose.store.writer import Writer
from tests.running import DIAGNOSE, environment, only_run, run, write
from tests.stored import STACK, WORKER, rows, whole_file


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


@pytest.mark.extended
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


@pytest.mark.extended
def test_a_million_steps_take_less_than_100_megabytes(million):
    assert sum(path.stat().st_size for path in million.iterdir()) < 100e6


@pytest.mark.extended
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
