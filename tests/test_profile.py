"""From records to a profile: warm-up, rates, many ranks, and records with holes."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.loading import input_stats
from diagnose.analysis.profile import load_profile, load_series, profile_of, read_logs
from diagnose.analysis.spans import part_of
from diagnose.analysis.steps import find_warmup
from diagnose.analysis.throughput import interval_95
from diagnose.core.ledger import SLOT_OF, SLOTS
from diagnose.core.phases import Phase
from diagnose.core.profile import Status
from diagnose.store.reader import RankLog
from diagnose.store.writer import Writer
from tests.rank_logs import MS, NOBODY, log_of, profile, steps_of
from tests.recorded import BATCH, USUAL_MS, manifest, record

# -- warm-up


def test_the_first_step_is_always_warm_up():
    assert find_warmup(steps_of(100, forward=10)) == 1


@pytest.mark.parametrize("count, warmup", [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (8, 2)])
def test_short_runs_keep_most_of_their_steps(count, warmup):
    assert find_warmup(steps_of(count, forward=[90, 80, 70, 60, 50, 40, 30, 20][:count])) == warmup


@pytest.mark.parametrize(
    "slow, warmup", [(1, 1), (2, 2), (3, 3), (4, 5), (5, 5), (6, 8), (12, 12), (17, 20)]
)
def test_leading_steps_that_are_much_slower_are_warm_up(slow, warmup):
    """Up to the next step at which the sampled lines can be cut off, too."""
    times = np.full(100, 10)
    times[:slow] = 21
    assert find_warmup(steps_of(100, forward=times)) == warmup


def test_leading_steps_that_compile_are_warm_up():
    compiling = np.zeros(100)
    compiling[[0, 6]] = 1
    assert find_warmup(steps_of(100, forward=10, compile=compiling)) == 8


def test_a_slow_step_in_the_middle_is_no_warm_up():
    times = np.full(100, 10)
    times[[0, 40, 60]] = 500
    assert find_warmup(steps_of(100, forward=times)) == 1


def test_no_more_than_a_quarter_is_warm_up():
    times = np.full(40, 10)
    times[:20] = 500
    assert find_warmup(steps_of(40, forward=times)) == 8
    assert find_warmup(steps_of(4, forward=[500, 500, 10, 10])) == 1


def test_the_warm_up_that_was_asked_for_counts():
    found = profile(log_of(steps_of(100, forward=10)), warmup=30)
    assert (found.steps.warmup, found.steps.measured) == (30, 70)
    assert profile(log_of(steps_of(100, forward=10)), warmup=0).steps.warmup == 0
    everything = profile(log_of(steps_of(100, forward=10)), warmup=1000)
    assert (everything.steps.warmup, everything.status) == (100, Status.TOO_FEW_STEPS)
    assert everything.steps.mean_ns is None


# -- rates


def test_rates_are_those_of_the_measured_steps():
    found = profile(log_of(steps_of(101, samples=32, tokens=32 * 128, forward=10))).throughput
    assert found.samples_per_s == pytest.approx(3200)
    assert found.tokens_per_s == pytest.approx(3200 * 128)
    assert found.steps_per_s == pytest.approx(100)
    assert found.samples_per_s_ci95 == pytest.approx((3200, 3200))


def test_the_rate_of_all_ranks_is_their_sum():
    logs = [log_of(steps_of(101, samples=8, forward=10), rank) for rank in range(4)]
    found = profile(*logs).throughput
    assert found.samples_per_s == pytest.approx(4 * 800)
    assert found.samples_per_s_ci95 == pytest.approx((4 * 800, 4 * 800))
    assert found.steps_per_s == pytest.approx(100)


def test_without_batch_sizes_there_is_no_rate_of_samples():
    found = profile(log_of(steps_of(101, samples=0, forward=10))).throughput
    assert (found.samples_per_s, found.samples_per_s_ci95, found.tokens_per_s) == (None, None, None)
    assert found.steps_per_s == pytest.approx(100)


def test_the_interval_holds_the_true_rate_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        times = rng.gamma(25, 4e5, 200).astype(np.int64)
        low, high = interval_95(np.full(200, 10), times)
        inside += low <= 10 / 1e7 * 1e9 <= high
    assert 0.93 <= inside / 400 <= 0.98


def test_a_step_that_takes_ever_longer_widens_the_interval():
    steady = interval_95(np.full(200, 10), np.full(200, 10 * MS))
    drifting = interval_95(np.full(200, 10), np.linspace(5 * MS, 15 * MS, 200).astype(np.int64))
    assert steady == pytest.approx((1000, 1000))
    assert drifting[0] < 900
    assert drifting[1] > 1100


@pytest.mark.parametrize("count", [1, 2, 7])
def test_too_few_steps_tell_nothing_of_the_rate_but_its_value(count):
    low, high = interval_95(np.full(count, 10), np.full(count, 10 * MS))
    assert (low, math.isinf(high)) == (0.0, True)


# -- many ranks


def test_sixty_four_ranks_are_told_apart_and_analysed_in_a_second():
    rng = np.random.default_rng(0)
    logs = [
        log_of(
            steps_of(2000, forward=rng.uniform(9, 11, 2000), communication=rank / 10),
            rank,
            samples=[
                (step, slot, (NOBODY, ("/t.py", slot, "f")), 5)
                for step in range(0, 2000, 100)
                for slot in range(9)
            ],
        )
        for rank in range(64)
    ]
    begun = time.process_time()
    found = profile(*logs)
    assert time.process_time() - begun < 1.0
    assert found.run.world_size == 64
    assert [rank.rank for rank in found.ranks] == list(range(64))
    assert {rank.host for rank in found.ranks} == {f"node{number}" for number in range(8)}
    for rank in found.ranks:
        assert rank.phase_time_ns[Phase.COMMUNICATION] == pytest.approx(rank.rank / 10 * MS)
        assert sum(rank.phase_time_ns.values()) == pytest.approx(
            10 * MS + rank.phase_time_ns[Phase.COMMUNICATION], rel=0.01
        )
    assert found.phase_time_ns == found.ranks[0].phase_time_ns


def test_a_rank_that_made_fewer_steps_than_the_warm_up_has_nothing_measured():
    found = profile(log_of(steps_of(100, forward=10)), log_of(steps_of(3, forward=10), 1), warmup=5)
    assert [sum(rank.phase_time_ns.values()) for rank in found.ranks] == [10 * MS, 0]


def test_several_processes_of_one_rank_are_no_world():
    logs = [
        log_of(steps_of(count, forward=ms), rank) for count, ms in ((100, 10), (90, 20)) for rank in (0, 1)
    ]
    found = profile(*logs)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.run.world_size == 2
    assert found.throughput.samples_per_s == pytest.approx(2 * 32 / 0.010)
    assert found.notes == ("4 processes of the script trained; the figures are those of the first.",)
    alone = profile(*logs[::2])
    assert (alone.run.world_size, alone.throughput.samples_per_s) == (1, pytest.approx(32 / 0.010))


def test_after_a_restart_the_newest_attempt_counts(tmp_path):
    folder = manifest(tmp_path / "run")
    twice = {name: 2 * ms for name, ms in USUAL_MS.items()}
    for rank in range(4):
        record(folder, 100, rank=rank)
    for rank in range(2):
        record(folder, 60, rank=rank, slots_ms=twice, restart=1)
    record(folder, 50, restart=1)  # another process of rank 0
    found = load_profile(folder)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert (found.run.world_size, found.steps.count) == (2, 60)
    assert found.throughput.samples_per_s == pytest.approx(2 * BATCH / 0.076, rel=0.05)
    assert found.notes == (
        "3 processes of the script trained; the figures are those of the first.",
        "The ranks were restarted, and what they did before is left out: "
        "rank0.sqlite, rank1.sqlite, rank2.sqlite, rank3.sqlite.",
    )
    logs, notes = read_logs(folder)
    assert [len(log.steps) for log in logs] == [60, 50, 60]
    assert notes == list(found.notes[1:])


# -- what a run says of itself


@pytest.mark.parametrize(
    "manifest, meta, status",
    [
        ({}, {}, Status.OK),
        ({"exit_code": 0}, {}, Status.OK),
        ({"exit_code": 3}, {}, Status.SCRIPT_FAILED),
        ({"signal": 9}, {}, Status.SCRIPT_FAILED),
        ({"exit_code": 0}, {"error": "ValueError"}, Status.SCRIPT_FAILED),
    ],
)
def test_a_script_that_failed_is_said_to_have_failed(manifest, meta, status):
    found = profile(log_of(steps_of(100, forward=10), meta=meta), **manifest)
    assert (found.status, found.run.error) == (status, meta.get("error"))


@pytest.mark.parametrize("count, status", [(20, Status.TOO_FEW_STEPS), (21, Status.OK)])
def test_fewer_than_twenty_measured_steps_are_too_few(count, status):
    assert profile(log_of(steps_of(count, forward=10))).status is status


def test_notes_of_all_ranks_are_kept_with_their_rank_and_each_once():
    meta = {"notes": ["gc is off"]}
    one = profile(
        log_of(steps_of(30, forward=10), meta=meta), notes=["from the launcher", "from the launcher"]
    )
    two = profile(*(log_of(steps_of(30, forward=10), rank, meta=meta) for rank in range(2)))
    assert one.notes == ("gc is off", "from the launcher")
    assert two.notes == ("rank 0: gc is off", "rank 1: gc is off")


def test_a_file_that_nobody_closed_is_named_once_the_script_has_ended():
    log = log_of(steps_of(30, forward=10), meta={"finished": False})
    assert profile(log).notes == (), "it is being written"
    assert profile(log, ended_unix=5.0, started_unix=2.0).notes == (
        "rank0.sqlite was not closed (killed, or a full disk?); its last records are missing.",
    )


def test_what_measuring_cost_is_spans_sampler_and_flusher():
    meta = {"span_ns": 400, "sampler_ns": 100_000, "flusher_ns": 300_000, "startup_ns": 200 * MS}
    found = profile(log_of(steps_of(100, forward=10), meta=meta), startup_s=0.1).overhead
    assert found.us_per_step == pytest.approx(5 * 0.4 + 1 + 3)
    assert found.startup_s == pytest.approx(0.3)


def test_events_of_all_ranks_are_counted():
    events = [(1, 1, "gc", {}), (2, 5, "gc", {}), (3, 5, "checkpoint", {})]
    logs = [log_of(steps_of(30, forward=10), rank, events=events) for rank in range(2)]
    assert profile(*logs).events == {"gc": 4, "checkpoint": 2}


def test_a_part_of_a_run_has_as_many_batches_in_a_step_as_all_of_it():
    """Two batches a step all along; workers come after the hundredth."""
    steps = steps_of(1000, data_wait=10, forward=10)
    came = [
        {"worker": 0, "fetch_ns": 1, "collate_ns": 1, "history": [[int(steps[at, 0]), 1, 2, 3, 4]]}
        for at in (50, 500)
    ]
    log = log_of(steps, meta={"counters": {"batches": 2000}}, workers=came)
    whole, part = input_stats(log, 1), input_stats(part_of(log, 0, 100), 1)
    assert whole.batches_per_step == part.batches_per_step == 2
    assert whole.workers is not None and part.workers is not None
    assert (whole.workers.num_workers, part.workers.num_workers) == (2, 1)
    later = part_of(part_of(log, 100), 100, 200)
    assert input_stats(later, 1).batches_per_step == 2


def test_too_few_steps_say_nothing_of_how_sure_their_rate_is():
    found = profile(log_of(steps_of(3, forward=10)))
    assert found.throughput.samples_per_s is not None
    assert found.throughput.samples_per_s_ci95 is None


# -- records with holes


def test_a_rank_that_said_nothing_of_itself_is_analysed():
    log = RankLog(path=Path("rank0.sqlite"), steps=steps_of(30, forward=10))
    found = profile_of({}, [log])
    assert (found.status, found.steps.count, found.run.device, found.run.torch) == (
        Status.OK,
        30,
        "cpu",
        None,
    )
    assert found.overhead.us_per_step == 0
    assert found.input.workers is None


def test_stacks_without_any_frame_of_the_users_are_other_time():
    samples = [(1, SLOT_OF["gap_after_forward"], (NOBODY,), 10), (1, SLOT_OF["forward"], (NOBODY,), 10)]
    found = profile(log_of(steps_of(30, forward=10, gap_after_forward=5), samples=samples))
    assert found.phase_time_ns[Phase.OTHER] == 5 * MS
    assert found.where == ()


def test_slots_of_a_newer_recorder_are_passed_over():
    samples = [(1, len(SLOTS) + 3, (NOBODY, ("/a.py", 1, "f")), 10)]
    assert profile(log_of(steps_of(30, forward=10), samples=samples)).where == ()


def test_a_run_without_steps_says_so_and_keeps_its_notes():
    found = profile_of({"id": "run", "notes": ["nothing was recorded"]}, [])
    assert (found.status, found.steps.count, found.notes) == (Status.NO_STEPS, 0, ("nothing was recorded",))
    assert found.step_time_ns == 0
    assert found.share(Phase.FORWARD) is None


def test_the_series_of_a_run_are_its_measured_steps(tmp_path):
    writer = Writer(tmp_path, 0)
    times = np.linspace(5, 15, 40)
    times[0] = 900
    writer.add_steps([tuple(row) for row in steps_of(40, forward=times, gap_after_forward=2).tolist()])
    writer.close()
    series = load_series(tmp_path)
    assert len(series.step_time_ns) == 39
    np.testing.assert_allclose(series.step_time_ns, sum(series.phase_time_ns.values()))
    assert series.samples.tolist() == [32.0] * 39
    assert float(series.step_time_ns.mean()) == pytest.approx(load_profile(tmp_path).step_time_ns)


def test_the_series_of_a_run_without_records_are_empty(tmp_path):
    assert len(load_series(tmp_path).step_time_ns) == 0
