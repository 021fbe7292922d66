"""Rules of ranks: who is late, and who waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.phases import Phase
from diagnose.rules import diagnosed
from diagnose.rules._ranks import latest, ranks_example
from diagnose.rules.input_straggler import InputStraggler
from diagnose.rules.missing_no_sync import MissingNoSync
from diagnose.rules.small_buckets import SmallBuckets
from tests.running import DIAGNOSE, only_run, run, write

pytestmark = pytest.mark.alone

LATE = {Phase.FORWARD: 50.0, Phase.BACKWARD: 50.0}
WAITING = {Phase.FORWARD: 20.0, Phase.BACKWARD: 80.0}


@pytest.mark.parametrize(("first", "second", "rank"), [(LATE, WAITING, 0), (WAITING, LATE, 1)])
def test_the_time_lost_is_part_of_the_first_ranks_own_phases(
    first: dict[Phase, float], second: dict[Phase, float], rank: int
):
    late = latest(ranks_example(first, second), (Phase.FORWARD,))
    assert late is not None
    assert late.rank == rank
    assert late.waits == {Phase.FORWARD if rank == 0 else Phase.BACKWARD: pytest.approx(30e6)}


def test_a_rank_that_is_slower_and_that_nobody_waits_for_is_not_late():
    busy = {Phase.FORWARD: 50.0, Phase.BACKWARD: 50.0}
    idle = {Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0, Phase.OTHER: 30.0}
    assert latest(ranks_example(idle, busy), (Phase.FORWARD,)) is None


def test_a_rank_that_stands_still_in_its_loop_is_not_said_to_wait_for_its_data():
    own = {Phase.OTHER: 30.0, Phase.BACKWARD: 50.0}
    fed = {Phase.DATA_WAIT: 30.0, Phase.BACKWARD: 50.0}
    met = {Phase.DATA_WAIT: 1.0, Phase.BACKWARD: 79.0}
    stands = InputStraggler().check(ranks_example(own, met, standing_ms=29.0))
    waits = InputStraggler().check(ranks_example(fed, met))
    assert stands is not None and "stands still" in stands.summary
    assert waits is not None and "waits for its data" in waits.summary
    assert stands.ranks == waits.ranks == (0,)


SCRIPT = """
import time, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
if dist.get_rank() == 1:
    model.module[1].weight.register_hook(lambda grad: time.sleep(0.03))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_rank_that_is_slow_in_its_backward_pass_is_named(tmp_path: Path):
    script = write(tmp_path / "train.py", SCRIPT)
    ended = run(*DIAGNOSE, "--nproc-per-node", "2", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    profile = diagnosed(load_profile(only_run(tmp_path)))
    assert [ddp.rank for ddp in profile.program.ddp] == [0, 1]
    found = {finding.rule: finding for finding in profile.findings}
    assert found["compute-straggler"].ranks == (1,)
    assert found["compute-straggler"].lost_ns_per_step > 0.3 * profile.step_time_ns


def test_small_buckets_also_cost_the_cpu_that_their_reduction_takes():
    *_, crowded = SmallBuckets.fires_on
    found = SmallBuckets().check(crowded)
    assert found is not None
    assert found.lost_ns[Phase.BACKWARD] == pytest.approx(0.15 * (1 - 2 / 40) * crowded.step_time_ns)


def test_averages_that_are_not_needed_cost_what_was_waited_in_all_of_them():
    *_, waiting = MissingNoSync.fires_on
    found = MissingNoSync().check(waiting)
    assert found is not None
    hidden = 3 * 0.3 * 3e6
    assert found.lost_ns == {Phase.COMMUNICATION: pytest.approx(24e6 * 3 / 4 + hidden)}
