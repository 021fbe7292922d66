"""Jobs of many ranks: read in parallel, recorded in part, and from several hosts in one folder."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from diagnose.analysis import profile as profiles
from diagnose.analysis.lateness import medians_of_others
from diagnose.analysis.profile import load_profile, profile_of, read_logs
from diagnose.analysis.reducers import Reducers, reducers
from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.launch.rank_choice import SPREAD, in_sample, is_choice, records
from diagnose.launch.run_folder import common_folder, write_manifest
from diagnose.report import Terminal, to_text
from diagnose.rules import diagnosed
from diagnose.store.reader import read_rank
from diagnose.store.runs import read_manifest
from diagnose.store.tail import look
from diagnose.store.writer import Writer
from tests.running import DIAGNOSE, only_run, run, write

RANKS, STEPS, LATE = 40, 200, 27
MS = 1_000_000
FRAMES = (("", 0, ""), ("train.py", 7, "main"))


def steps_of(rank: int, steps: int = STEPS) -> npt.NDArray[np.int64]:
    """Steps of one rank: each reads, computes, and waits for the one that reads slowly."""
    draw = np.random.default_rng(rank)
    rows = np.zeros((steps, len(COLUMNS)), dtype=np.int64)
    rows[:, COLUMNS.index("data_wait")] = draw.normal(2, 0.1, steps) * MS + (5 * MS if rank == LATE else 0)
    rows[:, COLUMNS.index("forward")] = draw.normal(4, 0.1, steps) * MS
    busy = rows[:, len(COUNTS) :].sum(axis=1)
    rows[:, COLUMNS.index("backward")] = np.maximum(20 * MS - busy, 5 * MS)
    rows[:, COLUMNS.index("gap_after_optimizer")] = MS
    rows[:, COLUMNS.index("samples")] = 8
    rows[:, COLUMNS.index("tokens")] = draw.integers(100, 200, steps)
    rows[:, 0] = rows[:, len(COUNTS) :].sum(axis=1).cumsum()
    return rows


def write_rank(folder: Path, rank: int, *, world_size: int = RANKS, steps: int = STEPS) -> None:
    writer = Writer(folder, rank)
    place = {"rank": rank, "host": f"node{rank // 8}", "world_size": world_size, "finished": True}
    writer.set_meta({**place, "torch": "2.13.0"})
    rows = steps_of(rank, steps)
    for first in range(0, steps, 2):
        writer.add_steps(rows[first : first + 2].tolist())
        writer.add_samples(first, [(COLUMNS.index("gap_after_optimizer") - len(COUNTS), FRAMES, MS)])
        writer.add_vitals(int(rows[first, 0]), first, {"cpu_ns": int(rows[first, 0])})
    writer.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 ranks; one file is torn, one is no database."""
    folder = tmp_path_factory.mktemp("many")
    for rank in range(RANKS):
        write_rank(folder, rank)
    os.truncate(folder / "rank31.sqlite", (folder / "rank31.sqlite").stat().st_size // 2)
    (folder / "rank33.sqlite").write_bytes(b"no database" * 1000)
    now = time.time()
    manifest = {"id": "many", "script": "train.py", "exit_code": 0}
    write_manifest(folder, {**manifest, "started_unix": now - 9, "ended_unix": now})
    return folder


def in_parallel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setattr(profiles, "FEW_BYTES", 0)
    return load_profile(folder)


def test_many_ranks_read_in_parallel_give_what_one_process_finds(many, monkeypatch):
    logs, notes = read_logs(many)
    parallel, serial = in_parallel(many, monkeypatch), profile_of(read_manifest(many), logs, notes)
    for field in fields(Profile):
        if field.name != "notes":
            assert repr(getattr(parallel, field.name)) == repr(getattr(serial, field.name)), field.name
    assert set(parallel.notes) <= set(serial.notes), "tables of the first rank alone"
    assert len(parallel.ranks) >= RANKS - 2
    assert sum("rank31.sqlite" in note for note in parallel.notes) > 0
    assert sum("rank33.sqlite" in note for note in parallel.notes) > 0


def test_the_straggler_of_many_ranks_is_named_with_its_cause_and_stands_first(many, monkeypatch):
    profile = diagnosed(in_parallel(many, monkeypatch))
    finding = next(each for each in profile.findings if each.rule == "input-straggler")
    assert finding.ranks == (LATE,)
    late = next(rank for rank in profile.ranks if rank.rank == LATE)
    assert late.late_ns_per_step == pytest.approx(5 * MS, rel=0.1)
    assert late.late_share[Phase.DATA_WAIT] == 1.0
    text = to_text(profile, Terminal(width=120, color=False, unicode=True))
    rows = [line.split() for line in text.splitlines() if "node" in line and " ms" in line]
    assert rows[0][0] == str(LATE)


def test_a_reading_process_that_is_killed_costs_no_rank(many, monkeypatch):
    whole = in_parallel(many, monkeypatch)

    @contextmanager
    def one_killed(num_files: int) -> Iterator[Reducers]:
        with reducers(num_files) as pool:
            pool._processes[0].kill()
            yield pool

    monkeypatch.setattr(profiles, "reducers", one_killed)
    assert repr(load_profile(many)) == repr(whole)


def test_beside_a_training_no_process_is_started_to_read_with(many, monkeypatch):
    whole = in_parallel(many, monkeypatch)

    def reducers(num_files: int) -> Reducers:
        raise AssertionError("the CPUs are the training's")

    monkeypatch.setattr(profiles, "reducers", reducers)
    assert repr(load_profile(many, alone=True)) == repr(whole)


def test_a_file_of_a_newer_version_is_refused_from_whichever_process(tmp_path, monkeypatch):
    for rank in range(20):
        write_rank(tmp_path, rank, steps=30, world_size=20)
    with sqlite3.connect(tmp_path / "rank19.sqlite") as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(DiagnoseError, match=r"rank19\.sqlite: written by a newer diagnose"):
        in_parallel(tmp_path, monkeypatch)


def test_files_copied_together_from_several_hosts_are_one_run_and_missing_ones_are_told(tmp_path):
    for rank in (0, 1, 4):
        host = tmp_path / f"host{rank}"
        host.mkdir()
        write_rank(host, rank, world_size=6, steps=40)
    together = tmp_path / "host0"
    for rank in (1, 4):
        (tmp_path / f"host{rank}" / f"rank{rank}.sqlite").rename(together / f"rank{rank}.sqlite")
    profile = load_profile(together)
    assert [rank.rank for rank in profile.ranks] == [0, 1, 4]
    assert any(
        "3 of 6 ranks are here (their files are not in the run's folder)" in n for n in profile.notes
    )


def test_the_median_of_all_others_is_that_of_all_others():
    values = [5.0, 1.0, 3.0, 3.0, 9.0]
    assert medians_of_others(values) == [3.0, 4.0, 4.0, 4.0, 3.0]
    assert medians_of_others([2.0, 7.0]) == [7.0, 2.0]


# -- the file of a rank


def test_small_records_are_merged_as_they_age_and_nothing_is_lost(tmp_path):
    writer = Writer(tmp_path, 0)
    draw = np.random.default_rng(0)
    rows: list[list[int]] = []
    met: list[tuple[int, int]] = []
    for _ in range(400):
        new = draw.integers(0, 10**10, (int(draw.integers(1, 20)), len(COLUMNS))).tolist()
        writer.add_steps(new)
        writer.add_meetings([(row[0], row[1]) for row in new])
        rows += new
        met += [(row[0], row[1]) for row in new]
        writer.commit()
    writer.close()
    log = read_rank(writer.path)
    np.testing.assert_array_equal(log.steps, np.array(rows))
    np.testing.assert_array_equal(log.meetings, np.array(met))
    with look(writer.path) as file:
        chunks = file.chunks_from(0)
    assert len(chunks) < 120, "of 400"
    first = 0
    for chunk in chunks:
        part = np.array(rows[first : first + chunk.num_steps])
        assert chunk.first == first
        assert chunk.totals == [part[-1, 0], *part[:, 1:].sum(axis=0)]
        first += chunk.num_steps
    assert first == len(rows)


def test_who_follows_a_file_gets_each_step_once_while_records_are_merged(tmp_path):
    writer = Writer(tmp_path, 0)
    rows = steps_of(0, 600)
    seen = 0
    for first in range(600):
        writer.add_steps(rows[first : first + 1].tolist())
        writer.commit()
        if first % 40 == 0:
            with look(writer.path) as file:
                for chunk in file.chunks_from(seen):
                    assert chunk.first == seen
                    seen += chunk.num_steps
    assert seen > 500
    writer.close()


def test_sampled_stacks_grow_with_the_logarithm_of_the_steps(tmp_path):
    writer = Writer(tmp_path, 0)
    for first in range(5000):
        writer.add_samples(first, [(3, FRAMES, 10)])
    writer.add_steps(steps_of(0, 2).tolist())
    writer.close()
    samples = read_rank(writer.path).samples
    assert sum(weight for *_, weight in samples) == 50_000
    assert [first for first, *_ in samples[:20]] == list(range(20)), "the warm-up can be cut off anywhere"
    assert len(samples) < 400


# -- which ranks record


def test_a_choice_of_ranks_is_understood_or_refused():
    for text in ("all", "first", "sample", "0", "0,1,8-15", "3-3, 5"):
        assert is_choice(text), text
    for text in ("", "some", "5-3", "1,", "-1", "1-2-3", "0;1"):
        assert not is_choice(text), text
    environ = {"WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert [r for r in range(16) if records("0,3-5", {**environ, "RANK": str(r)})] == [0, 3, 4, 5]
    assert [r for r in range(16) if records("first", {**environ, "RANK": str(r)})] == [0]
    assert records("first", {}), "a process without a rank"


@pytest.mark.parametrize(("world_size", "local_size"), [(64, 8), (1024, 8), (10_000, 4), (4096, 1)])
def test_a_sample_has_the_first_rank_one_of_every_host_and_all_places_on_a_host(world_size, local_size):
    sample = [r for r in range(world_size) if in_sample(r, world_size, r % local_size, local_size)]
    assert sample[0] == 0
    assert {rank // local_size for rank in sample} == set(range(world_size // local_size))
    assert {rank % local_size for rank in sample} == set(range(local_size))
    assert len(sample) <= world_size // local_size + SPREAD + 1 or world_size <= SPREAD


def test_without_hosts_a_sample_is_spread_over_the_job():
    assert [r for r in range(48) if in_sample(r, 48, None, None)] == list(range(48))
    sample = [r for r in range(10_000) if in_sample(r, 10_000, None, None)]
    assert len(sample) == SPREAD
    assert max(np.diff([*sample, 10_000])) < 500


JOB = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_ranks_that_do_not_record_leave_no_file_and_the_report_says_so(tmp_path):
    write(tmp_path / "job.py", JOB)
    ended = run(*DIAGNOSE, "--nproc-per-node", "2", "--ranks", "1", "job.py", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.split() == ["trained"] * 2
    folder = only_run(tmp_path)
    assert [path.name for path in folder.glob("rank*")] == ["rank1.sqlite"]
    profile = load_profile(folder)
    assert [rank.rank for rank in profile.ranks] == [1]
    assert any("1 of 2 ranks are here (--ranks 1)" in note for note in profile.notes)


def test_tuning_needs_all_ranks(tmp_path):
    write(tmp_path / "job.py", "print('ran')")
    ended = run(*DIAGNOSE, "--tune", "--ranks", "sample", "job.py", cwd=tmp_path)
    assert (ended.code, ended.stdout) == (2, "")
    assert "--ranks sample leaves ranks out" in ended.stderr


# -- one folder for the ranks of all hosts


def test_hosts_of_one_job_share_a_folder_and_a_later_job_gets_another(tmp_path):
    assert common_folder(tmp_path, "job", 60, is_first=False) == ("job", False)
    (tmp_path / "job").mkdir()
    assert common_folder(tmp_path, "job", 60, is_first=True) == ("job", True)
    write_manifest(tmp_path / "job", {"started_unix": time.time(), "ended_unix": None})
    assert common_folder(tmp_path, "job", 60, is_first=False) == ("job", False)
    assert common_folder(tmp_path, "job", 60, is_first=None) == ("job", False)
    assert common_folder(tmp_path, "job", 60, is_first=True) == ("job-2", True), "one was killed"
    write_manifest(tmp_path / "job", {"started_unix": time.time(), "ended_unix": time.time()})
    assert common_folder(tmp_path, "job", 60, is_first=False) == ("job-2", False)
    write_manifest(tmp_path / "job", {"started_unix": time.time() - 999, "ended_unix": None})
    assert common_folder(tmp_path, "job", 60, is_first=False) == ("job-2", False)
