"""The gate of a job of several ranks: its throughput is that of all, and a rank that died is told of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.profile import read_logs
from diagnose.core.host import HostStats, foreign_cpus
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.units import NS_PER_MS
from diagnose.gate.ended_badly import failed, what_failed
from diagnose.gate.figures import figures_of
from diagnose.gate.job_steps import job_steps
from diagnose.gate.judging import judge
from diagnose.gate.measure import RunPlan, measured_run
from diagnose.gate.pairs import Asked, run_pairs
from diagnose.gate.rank_to_blame import rank_to_blame
from diagnose.gate.ranks_read import of_ranks, why_other_ranks
from diagnose.gate.result import GateResult, MeasuredRun, Metric, Pair, Side, Verdict
from diagnose.gate.why import explain
from diagnose.rules import profile
from diagnose.store.reader import RankLog
from tests.recorded import manifest, steps, writer

SAMPLES = COLUMNS.index("samples")
FORWARD = COLUMNS.index("forward")


def rank(
    folder: Path,
    number: int,
    step_ms: list[float],
    *,
    samples: int = 32,
    finished: bool = True,
    started_ms: float = 0.0,
    peak_bytes: int = 0,
    **facts: Any,
) -> None:
    """Writes the file of a rank whose steps took so long."""
    file = writer(folder, number, **{"world_size": 2, **facts})
    rows = np.zeros((len(step_ms), len(COLUMNS)), dtype=np.int64)
    rows[:, FORWARD] = np.array(step_ms) * NS_PER_MS
    rows[:, 0] = started_ms * NS_PER_MS + np.cumsum(rows[:, FORWARD])
    rows[:, SAMPLES] = samples
    file.add_steps([tuple(row) for row in rows.tolist()])
    if peak_bytes:
        readings: Any = {"allocator": {"allocated_bytes": 1, "peak_allocated_bytes": peak_bytes}}
        file.add_vitals(0, len(step_ms), readings)
    file.set_meta({"state": {"steps": len(step_ms), "finished": finished}})
    file.close()


def logs_of(folder: Path) -> list[RankLog]:
    logs, notes = read_logs(folder)
    assert not notes
    return logs


def test_a_job_is_as_fast_as_its_slowest_rank_and_trains_on_the_samples_of_all(tmp_path: Path) -> None:
    manifest(tmp_path)
    rank(tmp_path, 0, [10.0] * 100)
    rank(tmp_path, 1, [12.5] * 100, samples=64)
    figures = figures_of(logs_of(tmp_path), 20, 0).figures
    assert figures[Metric.STEP_MS] == pytest.approx(12.5)
    assert figures[Metric.SAMPLES_PER_S] == pytest.approx((32 + 64) * 80)
    assert figures[Metric.MEAN_SAMPLES_PER_S] == pytest.approx((32 + 64) * 80)
    assert figures[Metric.STARTUP] == pytest.approx(0.0125)


def test_of_the_devices_memory_that_of_the_fullest_rank_counts(tmp_path: Path) -> None:
    manifest(tmp_path)
    for number, peak_bytes in enumerate((3 << 30, 5 << 30)):
        rank(tmp_path, number, [10.0] * 100, peak_bytes=peak_bytes)
    assert figures_of(logs_of(tmp_path), 20, 0).figures[Metric.PEAK_DEVICE_MEMORY] == 5 << 30
    without = manifest(tmp_path / "cpu")
    rank(without, 0, [10.0] * 100)
    assert Metric.PEAK_DEVICE_MEMORY not in figures_of(logs_of(without), 20, 0).figures


def test_ranks_that_take_turns_at_being_late_do_not_make_every_step_late(tmp_path: Path) -> None:
    """Each ends every other step 2 ms after the other rank, which has it in its next step less."""
    manifest(tmp_path)
    rank(tmp_path, 0, [12.0, 8.0] * 50)
    rank(tmp_path, 1, [10.0, 12.0, *[8.0, 12.0] * 49])
    job = job_steps(logs_of(tmp_path))
    assert job.time_N.sum() == pytest.approx(1002 * NS_PER_MS), "the last one's end"
    assert job.time_N[2:].mean() == pytest.approx(10 * NS_PER_MS, rel=0.01)


def test_ranks_of_another_machine_are_put_on_the_first_ones_clock(tmp_path: Path) -> None:
    for name in ("another", "somewhere"):  # two machines may have one name
        folder = manifest(tmp_path / name)
        rank(folder, 0, [10.0] * 100)
        rank(folder, 1, [10.0] * 100, started_ms=5e9, host=name)
        assert figures_of(logs_of(folder), 20, 0).figures[Metric.STEP_MS] == pytest.approx(10)


def test_what_follows_a_ranks_death_is_not_counted(tmp_path: Path) -> None:
    """The other rank goes on by itself, twice as fast: no figure of a job of two."""
    manifest(tmp_path)
    rank(tmp_path, 0, [10.0] * 60 + [5.0] * 200)
    rank(tmp_path, 1, [10.0] * 60, finished=False)
    found = figures_of(logs_of(tmp_path), 20, 0)
    assert found.num_steps == 40
    assert found.figures[Metric.SAMPLES_PER_S] == pytest.approx(6400)
    assert found.job is not None
    assert found.job.note == (
        "rank 1 of 2 stopped after 60 steps without ending, another made 260: "
        "what came after is not counted"
    )


def test_a_rank_that_ends_before_the_others_has_not_died(tmp_path: Path) -> None:
    manifest(tmp_path)
    rank(tmp_path, 0, [10.0] * 100)
    rank(tmp_path, 1, [10.0] * 60)
    assert job_steps(logs_of(tmp_path)).note == ""


def test_a_rank_without_a_step_is_missing_and_a_second_process_of_a_rank_is_no_rank(tmp_path: Path) -> None:
    manifest(tmp_path)
    rank(tmp_path, 0, [10.0] * 40, world_size=3)
    rank(tmp_path, 2, [10.0] * 40, world_size=3)
    logs = logs_of(tmp_path)
    job = job_steps([*logs, logs[0]])
    assert (job.ranks, job.missing) == ((0, 2), (1,))
    assert job.samples_N.tolist() == [64.0] * 40


def test_other_ranks_are_no_foreign_processes() -> None:
    one = HostStats(process_cpus=1.0, child_cpus=0.5, busy_cpus=3.5, stolen_cpus=0.25)
    assert foreign_cpus([one]) == 2.25
    assert foreign_cpus([one, HostStats(process_cpus=1.5)]) == 0.75
    assert foreign_cpus([one, HostStats()]) is None


ENDED = """\
{own}W1121 23:21:21.723000 16127 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM
Traceback (most recent call last):
  File "/site-packages/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
head.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_23:21:21
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 16131)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 16131
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_23:21:21
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 16132)
============================================================
"""
"""What torchrun says, word for word, when rank 1 of two dies."""


def test_of_a_job_that_failed_the_rank_that_failed_first_is_shown(tmp_path: Path) -> None:
    said = "[rank1]: ValueError: broken\n[rank0]: RuntimeError: Connection closed by peer\n"
    assert what_failed(ENDED.format(own=said)) == (1, ("[rank1]: ValueError: broken",))
    assert what_failed(ENDED.format(own="no prefix\n")) == (1, ("no prefix",))
    assert what_failed("ValueError: alone\n") == (None, ("ValueError: alone",))
    (tmp_path / "stderr").write_text(ENDED.format(own=said))
    failure = failed("head-00", 1, tmp_path / "stderr").failure
    assert failure.reason == "head-00 ended with exit code 1: rank 1 failed first"
    assert failure.last_lines == ("[rank1]: ValueError: broken",)


def made(name: str, **more: Any) -> MeasuredRun:
    step_ms = 10.0
    return MeasuredRun(
        name=name,
        root=Path(),
        figures={Metric.STEP_MS: step_ms, Metric.SAMPLES_PER_S: 6400.0},
        num_steps=200,
        warmup=20,
        step_s=step_ms / 1000,
        wall_s=1.0,
        **{"folder": Path(name), "ranks": (0, 1), **more},
    )


def test_a_job_that_lost_a_rank_is_not_compared_with_a_whole_one() -> None:
    """Half the samples per second would be a regression, and is a crash; nor do earlier pairs pass it."""

    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        if name == "head-08":
            return made(name, ranks=(0,), missing_ranks=(1,))
        scatter = 0.96 if name in ("head-02", "head-05") else 1.0  # seven pairs do not suffice to stop
        return replace(made(name), figures={Metric.SAMPLES_PER_S: 6400.0 * scatter})

    paired = run_pairs(measure, Asked(metric=Metric.SAMPLES_PER_S))
    assert len(paired.pairs) == 7
    so_far = judge(paired.pairs, Metric.SAMPLES_PER_S, 0.03, last=True)
    assert so_far is not None and so_far.verdict is Verdict.PASS
    assert paired.judgement.verdict is Verdict.INCONCLUSIVE
    assert paired.stopped == "rank 1 recorded no step in head-08 and did in base-00: died early?"
    assert paired.judgement.reason == paired.stopped


def test_the_reader_is_told_how_many_ranks_there_were() -> None:
    whole, part = made("a"), made("b", ranks=(0,), missing_ranks=(1, 2), notes=("rank1.sqlite: torn",))
    assert of_ranks([made("a", ranks=(0,))]) == ()
    assert of_ranks([whole, whole])[0].startswith("2 ranks were read in each run: ")
    assert of_ranks([part])[0].startswith("1 of 3 ranks were read")
    two = made("c", ranks=(0,), missing_ranks=(1,))
    assert of_ranks([whole, two])[0].startswith("1 to 2 of 2 ranks were read")
    assert of_ranks([part])[1] == "b: rank1.sqlite: torn"
    assert why_other_ranks(whole, part).startswith("2 ranks recorded no step in b")
    assert why_other_ranks(whole, whole) == why_other_ranks(part, part) == ""


TRAINING = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in torch.utils.data.DataLoader(torch.randn(8000, 8), 8):
    if dist.get_rank() == 1:
        time.sleep(0.005)
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
"""


@pytest.mark.extended
def test_two_real_ranks_are_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.setenv("DIAGNOSE_NPROC_PER_NODE", "2")
    side = Side(label="head", name="a", root=tmp_path, command=("train.py",))
    run = measured_run(side, "head-00", tmp_path / "runs", RunPlan(steps=60))
    assert (run.ranks, run.missing_ranks, run.num_steps) == ((0, 1), (), 60)
    assert run.figures[Metric.STEP_MS] > 5
    assert run.figures[Metric.SAMPLES_PER_S] == pytest.approx(
        16_000 / run.figures[Metric.STEP_MS], rel=0.01
    )


# -- which rank it was


def slow_job(folder: Path, late_rank: int | None, seed: int) -> MeasuredRun:
    """A run of two ranks that meet in each step; one may take 5 ms longer to compute, the other waits."""
    place = manifest(folder)
    for number in range(2):
        late_ms = 5.0 if number == late_rank else 0.0
        waits_ms = 5.0 if late_rank is not None and number != late_rank else 0.0
        times = {"forward": 10.0 + late_ms, "communication": 1.0 + waits_ms, "backward": 20.0}
        file = writer(place, number, world_size=2, device="cpu")
        file.add_steps(steps(0, 60, times, spread=0.01, seed=seed))
        file.set_meta({"state": {"steps": 60, "finished": True}})
        file.close()
    return made(folder.name, folder=place)


@pytest.mark.parametrize("late_rank, told", [(0, "forward took"), (1, "on rank 1, forward took")])
def test_the_phase_is_that_of_the_rank_that_became_slower(
    late_rank: int, told: str, tmp_path: Path
) -> None:
    """The other one's communication grew as much, and says nothing."""
    pairs = tuple(
        Pair(
            base=slow_job(tmp_path / f"base-{n}", None, n),
            head=slow_job(tmp_path / f"head-{n}", late_rank, n + 100),
            base_first=True,
        )
        for n in range(6)
    )
    result = GateResult(
        verdict=Verdict.REGRESSION,
        metric=Metric.STEP_MS,
        asked=Metric.STEP_MS,
        max_drop=0.03,
        sides=(),
        pairs=pairs,
    )
    why = explain(result)
    assert why[0].text.startswith(told)
    assert not [reason for reason in why if "communication took" in reason.text]


def test_what_all_ranks_lost_alike_is_told_from_the_first() -> None:
    def job(*forward_ms: float) -> Profile:
        of_ranks = (
            RankProfile(rank=number, host="a", phase_time_ns={Phase.FORWARD: ms * NS_PER_MS})
            for number, ms in enumerate(forward_ms)
        )
        return profile(step_ms=max(forward_ms), ranks=tuple(of_ranks))

    assert rank_to_blame([job(10, 10)] * 3, [job(15, 15.5)] * 3) is None
    assert rank_to_blame([job(10, 10)] * 3, [job(10, 15)] * 3) == 1
    assert rank_to_blame([job(10, 10)] * 3, [job(15, 10)] * 3) is None
    assert rank_to_blame([job(10)] * 3, [job(15)] * 3) is None
    assert rank_to_blame([], []) is None
