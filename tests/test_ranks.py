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
from diagnose.analysis.rank_summary import HOST, LAUNCHES, RankSummary, meet_in_all, with_idleness
from diagnose.core.ledger import COLUMNS
from diagnose.core.parallel import Ddp, Pipeline
from diagnose.core.phases import Phase
from diagnose.core.program import Program
from diagnose.launch.place import doubt_about, place_of, rank_of
from diagnose.rules import diagnosed
from diagnose.rules._engine import ask_one, built_in
from diagnose.rules.frequent_collectives import FrequentCollectives
from diagnose.store.reader import RankLog
from tests.running import DIAGNOSE, REPOSITORY, only_run, recorded, run, write

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import ranks

RULES = built_in()

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
    profile = diagnosed(load_profile(recorded(tmp_path, SHARDED, num_ranks=2)))
    fsdp = profile.program.fsdp
    assert fsdp is not None and fsdp.gather_ns and fsdp.scatter_ns
    assert (fsdp.world_size, fsdp.reshards, fsdp.unsharded_bytes) == (2, True, 2 * (32 * 32 + 32) * 4)
    assert profile.phase_time_ns[Phase.COMMUNICATION] > 0.5 * (fsdp.gather_ns + fsdp.scatter_ns)
    assert "frequent-collectives" not in {finding.rule for finding in profile.findings}


@pytest.mark.parametrize(("on_cpu", "waits"), [(True, (100.0, 50.0, 200.0)), (False, (None, None, None))])
def test_what_sharded_parameters_are_waited_for_is_not_told_of_gpus(
    on_cpu: bool, waits: tuple[float | None, ...]
):
    """There the host only launches, and half of it in a thread of autograd's."""
    fact = {
        "world_size": 2,
        "on_cpu": on_cpu,
        "gathered_ns": 300,
        "regathered_ns": 150,
        "scattered_ns": 600,
    }
    steps = np.zeros((3, len(COLUMNS)), dtype=np.int64)
    fsdp = fsdp_of(RankLog(path=Path(), meta={"facts": {"fsdp": fact}}, steps=steps))
    assert fsdp is not None and (fsdp.gather_ns, fsdp.regather_ns, fsdp.scatter_ns) == waits


SHARDED_TWICE = SHARDED.replace("(32, 32)", "(1024, 1024)").replace("(4, 32)", "(4, 1024)")


@pytest.mark.extended
@pytest.mark.parametrize("reshards", [True, False])
def test_what_the_backward_pass_gathers_anew_is_told_and_named_where_it_would_fit(
    tmp_path: Path, reshards: bool
):
    text = SHARDED_TWICE
    if not reshards:
        text = text.replace("mesh=mesh)", "mesh=mesh, reshard_after_forward=False)")
    profile = load_profile(recorded(tmp_path, text, num_ranks=2))
    fsdp = profile.program.fsdp
    assert fsdp is not None and fsdp.gather_ns and fsdp.regather_ns is not None
    if reshards:
        assert 0.2 * fsdp.gather_ns < fsdp.regather_ns < 0.8 * fsdp.gather_ns
    else:
        assert fsdp.regather_ns < 0.05 * fsdp.gather_ns, "calls that find all there"
    assert (ask_one(RULES["oversharded"], profile) is not None) == reshards


PIPELINED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
part = torch.nn.Sequential(*(torch.nn.Linear(768, 768) for _ in range(6)))
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, int(sys.argv[1]), loss_fn=torch.nn.MSELoss())
optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
rows = torch.randn(256, 768)
for step in range(40):
    optimizer.zero_grad()
    schedule.step(rows) if rank == 0 else schedule.step(target=rows)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_stages_that_wait_for_micro_batches_are_named_until_there_are_enough(
    tmp_path: Path, num_microbatches: int
):
    profile = load_profile(recorded(tmp_path, PIPELINED, num_microbatches, num_ranks=2))
    pipeline = profile.program.pipeline
    assert pipeline is not None and pipeline.idle_ns is not None
    assert (pipeline.num_stages, pipeline.num_ranks) == (2, 2)
    assert (pipeline.kind, pipeline.num_microbatches) == ("ScheduleGPipe", num_microbatches)
    found = ask_one(RULES["pipeline-bubble"], profile)
    if num_microbatches == 8:
        assert found is None
        return
    assert pipeline.idle_ns > 0.15 * profile.step_time_ns, "a third, if nothing else took time"
    assert found is not None and found.lost_ns_per_step < 0.34 * profile.step_time_ns
    assert found.code == "ScheduleGPipe(stage, n_microbatches=8, loss_fn=torch.nn.MSELoss())"
    made = next(line for line in PIPELINED.split("\n") if line.startswith("schedule ="))
    assert found.line == 1 + PIPELINED.split("\n").index(made)


def summary(rank: int, clock: str = HOST, exchanged_ns: float | None = 30.0) -> RankSummary:
    times = {Phase.COMMUNICATION: 20.0 + rank}
    return RankSummary(file="", rank=rank, phase_time_ns=times, exchanged_ns=exchanged_ns, clock=clock)


@pytest.mark.parametrize(
    ("ranks", "idle_ns"),
    [
        ([summary(0), summary(1)], 20.0),
        ([summary(0), summary(1, exchanged_ns=5.0)], 5.0),
        ([summary(0)], None),
        ([summary(0), summary(1, exchanged_ns=None)], None),
        ([summary(0), summary(1, clock=LAUNCHES)], None),
    ],
)
def test_what_stages_wait_is_what_the_least_waiting_rank_does_and_unknown_without_all_of_them(
    ranks: list[RankSummary], idle_ns: float | None
):
    pipeline = Pipeline(kind="ScheduleGPipe", num_stages=2, num_ranks=2, num_microbatches=2)
    told = with_idleness(pipeline, ranks)
    assert told is not None and told.idle_ns == idle_ns
    assert with_idleness(None, ranks) is None


@pytest.mark.parametrize(("among_all_ns", "in_all"), [(28.0, True), (10.0, False)])
def test_ranks_whose_models_wait_for_all_do_so_together_and_those_that_wait_for_some_do_not(
    among_all_ns: float, in_all: bool
):
    ranks = [replace(summary(rank), among_all_ns=among_all_ns, ddp=Ddp(rank=rank)) for rank in range(2)]
    assert meet_in_all(ranks, Program(), by_meetings=True) is in_all
    assert not meet_in_all(ranks, Program(), by_meetings=False)


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
    profile = load_profile(recorded(tmp_path, EXCHANGING, num_ranks=2))
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
