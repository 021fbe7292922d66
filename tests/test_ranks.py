"""Ranks of a job: recorded as such however they were started, and what they wait for each other."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.profile import load_profile
from diagnose.analysis.program import fsdp_of
from diagnose.analysis.rank_clocks import clock_offset, kept
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.launch.place import doubt_about, place_of, rank_of
from diagnose.rules import diagnosed
from diagnose.rules.frequent_collectives import FrequentCollectives
from diagnose.store.reader import RankLog
from tests.running import DIAGNOSE, REPOSITORY, only_run, run, write

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import ranks

SPAWNED = """
import sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, args=(sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.extended)])
def test_processes_that_the_script_starts_are_its_ranks_whatever_the_environment_says(
    tmp_path: Path, method: str
):
    script = write(tmp_path / "train.py", SPAWNED)
    ended = run(*DIAGNOSE, script, tmp_path / "store", method, cwd=tmp_path, RANK="first")
    assert ended.code == 0, ended.stderr
    profile = load_profile(only_run(tmp_path))
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    assert profile.program.meetings is not None
    assert set(profile.program.meetings.wait_ns) == {0, 1}
    assert any("RANK is 'first', which is no number" in note for note in profile.notes)


def test_the_process_group_knows_the_rank_better_than_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert place_of({}) == (3, 8)
    assert place_of({"place": [1, 2]}) == (1, 2)


@pytest.mark.parametrize(("text", "rank"), [("", 0), ("2", 2), ("two", 0), ("-1", 0), ("1.5", 0)])
def test_a_rank_that_is_no_number_counts_as_the_first_and_is_told(text: str, rank: int):
    assert rank_of({"RANK": text}) == rank
    assert bool(doubt_about({"RANK": text})) == (text not in ("", "2"))


@pytest.mark.parametrize(("offset_ns", "drift"), [(0, 0.0), (7_200_000_000_123, 0.0), (-5_000_000, 2e-5)])
def test_the_offset_and_the_drift_of_another_hosts_clock_are_taken_off(offset_ns: int, drift: float):
    draw = np.random.default_rng(0)
    true_ns = np.cumsum(draw.integers(40_000_000, 60_000_000, 900)) + 10**12
    theirs = true_ns + offset_ns + (drift * (true_ns - true_ns[0])).astype(np.int64)
    late = draw.integers(0, 100_000, 900)  # of a message
    late[::50] += 30_000_000  # and now and then of one that was lost

    def chosen(arrived: np.ndarray, met: np.ndarray) -> dict[int, int]:
        steps = np.zeros((900, len(COLUMNS)), dtype=np.int64)
        steps[:, COLUMNS.index("end_ns")] = met + 1_000_000
        return kept(np.stack([arrived, met], axis=1), steps)

    clock = clock_offset(chosen(true_ns, true_ns), chosen(theirs, theirs + late))
    assert clock is not None
    off = [clock.removed(int(there)) - int(true) for there, true in zip(theirs, true_ns, strict=True)]
    assert max(map(abs, off)) < 150_000


def test_a_rank_that_is_sent_buffers_before_the_others_have_come_tells_no_time():
    """They are sent before each forward; the average of the gradients, later in the step, ends for all."""
    end_ns = np.arange(1, 601, dtype=np.int64) * 50_000_000
    steps = np.zeros((600, len(COLUMNS)), dtype=np.int64)
    steps[:, COLUMNS.index("end_ns")] = end_ns

    def of(sent_ns: int) -> dict[int, int]:
        buffers = np.stack([end_ns - 45_000_000, end_ns - 44_000_000 + sent_ns], axis=1)
        gradients = np.stack([end_ns - 9_000_000, end_ns - 5_000_000], axis=1)
        return kept(np.stack([buffers, gradients], axis=1).reshape(-1, 2), steps)

    clock = clock_offset(of(0), of(30_000_000))
    assert clock is not None and clock.offset_ns == 0


def test_that_a_rank_comes_ever_less_late_in_a_short_run_is_no_drift_of_its_clock():
    first = {number: 2_000_000 * number for number in range(200)}
    clock = clock_offset(first, {number: ns + 5_000 * (200 - number) for number, ns in first.items()})
    assert clock is not None
    assert clock.drift == 0


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_what_sharded_parameters_are_waited_for_is_communication_and_none_of_the_scripts(tmp_path: Path):
    script = write(tmp_path / "train.py", SHARDED)
    ended = run(*DIAGNOSE, "--nproc-per-node", "2", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    profile = diagnosed(load_profile(only_run(tmp_path)))
    fsdp = profile.program.fsdp
    assert fsdp is not None and fsdp.gather_ns and fsdp.scatter_ns
    assert (fsdp.world_size, fsdp.reshards, fsdp.unsharded_bytes) == (2, True, 2 * (32 * 32 + 32) * 4)
    assert profile.phase_time_ns[Phase.COMMUNICATION] > 0.5 * (fsdp.gather_ns + fsdp.scatter_ns)
    assert "frequent-collectives" not in {finding.rule for finding in profile.findings}


@pytest.mark.parametrize(("on_cpu", "waits"), [(True, (100.0, 200.0)), (False, (None, None))])
def test_what_sharded_parameters_are_waited_for_is_not_told_of_gpus(
    on_cpu: bool, waits: tuple[float | None, float | None]
):
    """There the host only launches, and half of it in a thread of autograd's."""
    fact = {"world_size": 2, "on_cpu": on_cpu, "gathered_ns": 300, "scattered_ns": 600}
    steps = np.zeros((3, len(COLUMNS)), dtype=np.int64)
    fsdp = fsdp_of(RankLog(path=Path(), meta={"facts": {"fsdp": fact}}, steps=steps))
    assert fsdp is not None and (fsdp.gather_ns, fsdp.scatter_ns) == waits


EXCHANGING = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.zeros(4, 8)
for step in range(40):
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        time.sleep(0.02)
        dist.isend(rows, 1).wait()
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, rows, 1)])
        work.wait()
    else:
        dist.recv(rows, 0)
        time.sleep(0.02)
        dist.send(rows, 0)
    model(rows).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_what_a_rank_waits_for_one_other_is_no_collective(tmp_path: Path):
    script = write(tmp_path / "train.py", EXCHANGING)
    ended = run(*DIAGNOSE, "--nproc-per-node", "2", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    profile = load_profile(only_run(tmp_path))
    for rank in profile.ranks:
        waited_ns = rank.phase_time_ns[Phase.COMMUNICATION]
        assert waited_ns > 10e6
        assert rank.exchanged_ns is not None and rank.exchanged_ns > 0.8 * waited_ns
    assert FrequentCollectives().check(profile) is None
    together = replace(profile, ranks=tuple(replace(rank, exchanged_ns=0.0) for rank in profile.ranks))
    assert FrequentCollectives().check(together) is not None, "had they not been told apart"


@pytest.mark.extended
@pytest.mark.alone
def test_what_a_step_waits_for_gradients_is_what_it_loses_to_communication():
    """Over a link that is slow for certain: how fast the machine's own is depends on what else it does."""
    if not ranks.can_limit():
        pytest.skip("no network namespace can be made here")
    _, lost_ms, said_ms = ranks.exposure(2, 100, steps=60)
    assert lost_ms > 100
    assert said_ms == pytest.approx(lost_ms, rel=0.15)
