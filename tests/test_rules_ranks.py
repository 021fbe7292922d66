"""Rules of ranks: who is late, and who waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Calls, Program
from diagnose.core.series import Series
from diagnose.rules import diagnosed
from diagnose.rules._lines import at
from diagnose.rules._meetings import own_parts
from diagnose.rules._rank_examples import meeting, ranks_example
from diagnose.rules._ranks import latest
from diagnose.rules.compute_straggler import ComputeStraggler
from diagnose.rules.contended_rank import ContendedRank, delayed
from diagnose.rules.frequent_collectives import TURNS, UNPICKLES, FrequentCollectives
from diagnose.rules.input_straggler import InputStraggler
from diagnose.rules.uneven_work import SEEN, UnevenWork, uneven
from tests.running import recorded

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


IN_DATA, IN_LOOP = {Phase.DATA_WAIT: 65.0, Phase.OTHER: 5.0}, {Phase.DATA_WAIT: 35.0, Phase.OTHER: 35.0}
WAITS = {Phase.DATA_WAIT: 35.0, Phase.OTHER: 5.0, Phase.BACKWARD: 50.0}


def filtering(late: dict[Phase, float], works_ms: float, **late_share: float) -> Profile:
    """Two ranks that filter their batches for 30 ms and this long; the second one is late by 30 ms."""
    job = ranks_example(WAITS, {**late, Phase.BACKWARD: 20.0})
    waits, slow = (replace(each, working_ns=30e6) for each in job.ranks)
    shares = {Phase(name): share for name, share in late_share.items()}
    return replace(job, ranks=(waits, replace(slow, working_ns=works_ms * 1e6, late_share=shares)))


@pytest.mark.parametrize(
    ("late", "works_ms", "where"),
    [(IN_DATA, 60.0, "what the loop does to its batches"), (IN_LOOP, 30.0, "other")],
)
def test_where_a_rank_is_slower_is_told_by_what_it_takes_longer_than_the_others(
    late: dict[Phase, float], works_ms: float, where: str
):
    found = ComputeStraggler().check(filtering(late, works_ms))
    assert found is not None
    assert found.summary == f"Rank 1 is slower in {where}, and the others wait."
    met = Program(meetings=meeting(40, 10, last=1, held_ms=30))
    job = filtering({**late, Phase.COMMUNICATION: 10.0}, works_ms)
    others, slow = job.ranks
    others = replace(others, phase_time_ns={**others.phase_time_ns, Phase.COMMUNICATION: 40e6})
    found = ComputeStraggler().check(replace(job, program=met, ranks=(others, slow)))
    assert found is not None
    assert found.summary == f"Rank 1 is slower in {where}, and the others wait for it."
    assert found.evidence[1] == f"It takes longer than they do for {where} (30.0 ms)."


@pytest.mark.parametrize(
    ("late", "works_ms", "timed", "not_timed"),
    [(IN_DATA, 60.0, "data_wait", "other"), (IN_LOOP, 30.0, "other", "data_wait")],
)
def test_a_rank_takes_turns_or_not_by_the_phase_in_which_its_lateness_was_measured(
    late: dict[Phase, float], works_ms: float, timed: str, not_timed: str
):
    steady = filtering(late, works_ms, **{timed: 0.9, not_timed: 0.5})
    in_turn = filtering(late, works_ms, **{timed: 0.5, not_timed: 0.9})
    assert ComputeStraggler().check(steady) is not None
    assert ComputeStraggler().check(in_turn) is None


def test_a_rank_that_does_nothing_but_stand_or_work_loses_no_less_than_nothing_of_a_phase():
    """The parts of a phase are sums of their own, which rounding may make larger than it is."""
    one = RankProfile(
        rank=0,
        host="node",
        phase_time_ns={Phase.OTHER: 30e6, Phase.DATA_WAIT: 20e6},
        standing_ns=30e6 + 1e-6,
        working_ns=20e6 + 1e-6,
    )
    for phase, other in ((Phase.OTHER, Phase.DATA_WAIT), (Phase.DATA_WAIT, Phase.OTHER)):
        assert own_parts(one, phase, 10e6) == {phase: 0.0, other: pytest.approx(10e6)}


def job_of_hosts(late: dict[Phase, float], others: dict[Phase, float], slow: set[int]) -> Profile:
    """Two hosts of four ranks. Those that are slow take turns at being the slowest."""
    job = ranks_example(*(late if rank in slow else others for rank in range(8)))
    shares = dict.fromkeys(Phase, 1 / len(slow))
    return replace(
        job,
        ranks=tuple(
            replace(each, host=f"gpu{each.rank // 4}", late_share=shares if each.rank in slow else {})
            for each in job.ranks
        ),
    )


def test_a_slow_host_is_named_with_all_its_ranks():
    finding = ComputeStraggler().check(job_of_hosts(LATE, WAITING, {4, 5, 6, 7}))
    assert finding is not None
    assert finding.ranks == (4, 5, 6, 7)
    assert finding.summary == "Ranks 4 to 7, all on gpu1, are slower in forward, and the others wait."
    assert finding.lost_ns_per_step == pytest.approx(30e6)
    assert ComputeStraggler().check(job_of_hosts(LATE, WAITING, {2, 3, 6, 7})) is None, "they take turns"


def test_of_ranks_that_wait_alike_for_their_data_none_is_blamed_alone():
    fed = {Phase.DATA_WAIT: 30.0, Phase.BACKWARD: 50.0}
    met = {Phase.DATA_WAIT: 1.0, Phase.BACKWARD: 79.0}
    finding = InputStraggler().check(job_of_hosts(fed, met, {4, 5, 6, 7}))
    assert finding is not None and finding.ranks == (4, 5, 6, 7)
    assert "gpu1 alone" in finding.fix
    first = InputStraggler().check(job_of_hosts(fed, met, {0, 2}))
    assert first is not None and first.ranks == (0, 2)
    assert set(first.lost_ns) == {Phase.DATA_WAIT}, "of the first rank, which waits for nobody"
    finding = InputStraggler().check(job_of_hosts(fed, met, {1, 6}))
    assert finding is not None and finding.ranks == (1, 6)
    assert finding.summary == "Ranks 1 and 6 wait for their data, and the others for them."


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


def trained(folder: Path, script: str, *arguments: str) -> Profile:
    """Trains on two ranks."""
    return diagnosed(load_profile(recorded(folder, script, *arguments, num_ranks=2)))


@pytest.mark.extended
def test_a_rank_that_is_slow_in_its_backward_pass_is_named(tmp_path: Path):
    profile = trained(tmp_path, SCRIPT)
    assert [ddp.rank for ddp in profile.program.ddp] == [0, 1]
    found = {finding.rule: finding for finding in profile.findings}
    assert found["compute-straggler"].ranks == (1,)
    assert found["compute-straggler"].lost_ns_per_step > 0.3 * profile.step_time_ns


BUFFERS = """
import sys, time, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    if dist.get_rank() == int(sys.argv[1]):
        time.sleep(0.03)
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_the_others_wait_for_to_send_buffers_is_named(tmp_path: Path, late: int):
    """DDP sends the first rank's before each forward: who waits for it there comes to no later meeting."""
    profile = trained(tmp_path, BUFFERS, str(late))
    found = {finding.rule: finding for finding in profile.findings}
    assert found["input-straggler"].ranks == (late,)
    assert found["input-straggler"].lost_ns_per_step > 0.5 * profile.step_time_ns
    waiting = profile.ranks[1 - late].phase_time_ns
    assert waiting[Phase.COMMUNICATION] > 20e6 > waiting[Phase.FORWARD]


SHARDED_OPTIMIZER = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 512)).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_what_an_optimizer_sends_is_no_collective_of_the_loops(tmp_path: Path):
    profile = trained(tmp_path, SHARDED_OPTIMIZER)
    assert "frequent-collectives" not in {finding.rule for finding in profile.findings}
    sent_ns = profile.ranks[0].exchanged_ns
    assert sent_ns is not None and sent_ns > 0.03 * profile.step_time_ns


@pytest.mark.parametrize(
    ("untrained", "texts", "usual_ms", "alone_ms", "named_ms"),
    [
        pytest.param(1.0, False, 40, 40, 40, id="only the first rank has a teacher"),
        pytest.param(1.0, False, 40, 20, 20, id="all have one, and the first asks it twice"),
        pytest.param(1.0, False, 20, 20, None, id="all have one, and the first evaluates now and then"),
        pytest.param(0.0, False, 40, 40, None, id="the first evaluates in every step"),
        pytest.param(0.0, True, 40, 40, 40, id="only the first rank writes texts"),
        pytest.param(0.0, True, 40, 20, 20, id="all do, and the first writes two"),
        pytest.param(0.0, True, 20, 20, None, id="all do, and the first evaluates now and then"),
    ],
)
def test_of_what_the_first_rank_computes_without_gradients_the_others_part_is_no_lateness(
    untrained: float, texts: bool, usual_ms: float, alone_ms: float, named_ms: float | None
):
    """In a mean step of 100 ms the first rank takes 40 ms for that, and so much is in every step."""
    first = {Phase.EVALUATION: 40.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 30.0, Phase.COMMUNICATION: 10.0}
    others = {**first, Phase.EVALUATION: 40.0 - alone_ms, Phase.COMMUNICATION: 10.0 + alone_ms}
    usual = {**first, Phase.EVALUATION: usual_ms, Phase.BACKWARD: 70.0 - usual_ms}
    line = at("ids = model.generate(prompts)", 0.4, phase=Phase.EVALUATION)
    found = ComputeStraggler().check(
        ranks_example(
            first,
            others,
            program=Program(
                meetings=meeting(10, 10 + alone_ms, last=0, held_ms=alone_ms),
                calls=Calls(num_steps=5, untrained=untrained, free=0.0),
            ),
            series=Series(median_ns={phase: ms * 1e6 for phase, ms in usual.items()}),
            where=(line,) if texts else (),
        )
    )
    assert (found is None) is (named_ms is None)
    if found is not None and named_ms is not None:
        assert found.lost_ns == {Phase.EVALUATION: pytest.approx(named_ms * 1e6)}


COMPUTES_LONGER = {Phase.FORWARD: 20.0, Phase.BACKWARD: 70.0, Phase.COMMUNICATION: 10.0}
WAITS_FOR_IT = {Phase.FORWARD: 20.0, Phase.BACKWARD: 30.0, Phase.COMMUNICATION: 50.0}
READS_LONGER = {**WAITS_FOR_IT, Phase.DATA_WAIT: 40.0, Phase.COMMUNICATION: 10.0}
LAST = meeting(50, 10, last=1, held_ms=40)


@pytest.mark.parametrize(
    ("chance_ms", "left"), [pytest.param(0, 1.0, id="alike in each step"), (4, 0.9), (30, 0.25)]
)
def test_what_ranks_that_are_alike_would_wait_for_each_other_is_not_won(chance_ms: float, left: float):
    met = Program(meetings=replace(LAST, chance_ns=chance_ms * 1e6))
    computes = ComputeStraggler().check(ranks_example(WAITS_FOR_IT, COMPUTES_LONGER, program=met))
    reads = InputStraggler().check(ranks_example(WAITS_FOR_IT, READS_LONGER, program=met))
    for found in (computes, reads):
        assert found is not None
        assert found.lost_ns == {Phase.COMMUNICATION: pytest.approx(40e6 * left)}
        assert any("40.0 ms" in sentence for sentence in found.evidence), "what they wait is said as it is"
    first = ComputeStraggler().check(
        ranks_example(
            COMPUTES_LONGER,
            WAITS_FOR_IT,
            program=Program(
                meetings=replace(meeting(10, 50, last=0, held_ms=40), chance_ns=chance_ms * 1e6)
            ),
        )
    )
    assert first is not None
    assert first.lost_ns == {Phase.BACKWARD: pytest.approx(40e6 * left)}
    contended = delayed(0.02, 0.4)
    crowded = contended.program.meetings
    assert crowded is not None
    crowded = replace(crowded, chance_ns=chance_ms * 1e6 * 0.9)  # it is held up for 36 ms
    waits = ContendedRank().check(replace(contended, program=Program(meetings=crowded)))
    assert waits is not None
    assert waits.lost_ns_per_step == pytest.approx(36e6 * left)
    fullest = UnevenWork().check(uneven(meetings=replace(SEEN, chance_ns=chance_ms * 0.75e6)))  # for 30 ms
    assert fullest is not None
    assert fullest.lost_ns_per_step == pytest.approx(30e6 * left)


def test_ranks_that_hold_each_other_up_by_chance_alone_are_not_named():
    met = Program(meetings=replace(LAST, chance_ns=40e6))
    for job in (
        ranks_example(WAITS_FOR_IT, COMPUTES_LONGER, program=met),
        ranks_example(WAITS_FOR_IT, READS_LONGER, program=met),
    ):
        assert ComputeStraggler().check(job) is None
        assert InputStraggler().check(job) is None


def test_what_the_others_wait_while_one_rank_unpickles_is_lost_once():
    found = FrequentCollectives().check(ranks_example(TURNS, TURNS, program=UNPICKLES))
    assert found is not None
    assert found.lost_ns == {Phase.COMMUNICATION: pytest.approx(19e6)}
    assert "For 16.0 ms more one rank alone unpickles" in found.evidence[-1]


LOGS = {Phase.FORWARD: 20.0, Phase.BACKWARD: 20.0, Phase.OTHER: 20.0, Phase.COMMUNICATION: 10.0}


def taught(first_ms: float, others_ms: float, usual_ms: float, saves_ms: float = 0.0) -> Profile:
    """Two ranks with a teacher, of which the first logs for 20 ms in each step. Each evaluates so long in
    the mean; the first one so long in a usual step, and it saves now and then."""
    late_ms = LOGS[Phase.OTHER] + first_ms - others_ms + saves_ms
    first = {**LOGS, Phase.EVALUATION: first_ms, Phase.CHECKPOINT: saves_ms}
    second = {**LOGS, Phase.OTHER: 0.0, Phase.EVALUATION: others_ms, Phase.COMMUNICATION: 10.0 + late_ms}
    met = meeting(10, 10 + late_ms, last=0, held_ms=late_ms)
    usual = {phase: ms * 1e6 for phase, ms in {**LOGS, Phase.EVALUATION: usual_ms}.items()}
    program = Program(meetings=met, calls=Calls(num_steps=5, untrained=1.0))
    return ranks_example(first, second, program=program, series=Series(median_ns=usual))


@pytest.mark.parametrize(
    ("job", "evaluation_ms"),
    [
        pytest.param(taught(60, 40, 40), 0, id="the first alone validates"),
        pytest.param(taught(60, 40, 40, saves_ms=30), 0, id="and saves"),
        pytest.param(taught(40, 40, 40), 0, id="alike"),
        pytest.param(taught(60, 40, 60), 20, id="its teacher is slower in every step"),
        pytest.param(taught(40, 0, 40), 40, id="it alone has one"),
        pytest.param(taught(60, 20, 40), 20, id="it alone has one, and all validate"),
    ],
)
def test_of_what_the_first_rank_evaluates_only_a_teacher_makes_it_late(job: Profile, evaluation_ms: float):
    found = ComputeStraggler().check(job)
    assert found is not None and found.ranks == (0,)
    lost = {Phase.OTHER: 20e6} | ({Phase.EVALUATION: evaluation_ms * 1e6} if evaluation_ms else {})
    assert found.lost_ns == {phase: pytest.approx(ns) for phase, ns in lost.items()}
