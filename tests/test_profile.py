"""From records to a profile: warm-up, phases that close, rates, many ranks, and records with holes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.gaps import measured_samples, split_gaps
from diagnose.analysis.lines import source_lines, worker_lines
from diagnose.analysis.loading import input_stats
from diagnose.analysis.profile import load_profile, load_series, profile_of, read_logs
from diagnose.analysis.spans import part_of
from diagnose.analysis.steps import find_warmup, phase_series, step_times
from diagnose.analysis.throughput import interval_95
from diagnose.core.ledger import COLUMNS, COUNTS, FIRST_GAP, HOOKED, SLOT_OF, SLOTS
from diagnose.core.phases import Phase
from diagnose.core.places import PLACES, begins_ns, coded, decoded, place_of
from diagnose.core.profile import Profile, Status
from diagnose.source.places import Places
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog
from diagnose.store.writer import Writer
from tests.recorded import BATCH, USUAL_MS, manifest, record

MS = 1_000_000
Steps = npt.NDArray[np.int64]


@pytest.fixture(scope="module", autouse=True)
def hypothesis_at_work() -> None:
    """Hypothesis measures the garbage collector, from its first test on."""
    given(st.none())(lambda nothing: None)()


def steps_of(count: int, samples: int = 32, tokens: int = 0, **slots_ms: Any) -> Steps:
    """Steps with some slots of so many milliseconds, each one number or one for each step."""
    steps = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    for name, time_ms in slots_ms.items():
        steps[:, COLUMNS.index(name)] = np.asarray(time_ms) * MS
    steps[:, COLUMNS.index("samples")] = samples
    steps[:, COLUMNS.index("tokens")] = tokens
    steps[:, COLUMNS.index("spans")] = 5
    steps[:, 0] = steps[:, len(COUNTS) :].sum(axis=1).cumsum()
    return steps


def log_of(steps: Steps, rank: int = 0, **parts: Any) -> RankLog:
    meta = {
        "rank": rank,
        "host": f"node{rank // 8}",
        "finished": True,
        "torch": "2.13.0",
        **parts.pop("meta", {}),
    }
    return RankLog(path=Path(f"rank{rank}.sqlite"), meta=meta, steps=steps, **parts)


def profile(*logs: RankLog, **manifest: Any) -> Profile:
    return profile_of({"id": "run", "script": "train.py", **manifest}, list(logs))


def shares(profile: Profile) -> float:
    return sum(profile.share(phase) or 0.0 for phase in Phase)


NOBODY = ("", 0, "")
TRAIN = """\
for step in range(100):
    x = get_batch()
    out = model(x)
    loss = criterion(out)
    loss.backward()
    log(loss)
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def line(script: str, number: int) -> tuple[tuple[str, int, str], ...]:
    return (NOBODY, (script, number, "<module>"))


def sites(script: str) -> list[tuple[str, str, int, str, int]]:
    lines = {"forward": 3, "backward": 5, "optimizer": 7}
    return [(kind, script, number, "<module>", 100) for kind, number in lines.items()]


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


# -- phases


def test_the_mean_of_each_phase_leaves_the_warm_up_out():
    times = np.full(100, 10)
    times[0] = 10_000
    found = profile(log_of(steps_of(100, forward=times, backward=20, optimizer=3, data_wait=7)))
    assert found.status is Status.OK
    assert {phase: ns / MS for phase, ns in found.phase_time_ns.items() if ns} == {
        Phase.FORWARD: 10,
        Phase.BACKWARD: 20,
        Phase.OPTIMIZER: 3,
        Phase.DATA_WAIT: 7,
    }
    assert set(found.phase_time_ns) == set(Phase), "measured, and took no time"
    assert found.step_time_ns == found.steps.mean_ns == found.steps.median_ns == 40 * MS
    assert found.steps.total_time_ns == 99 * 40 * MS


def test_a_gap_that_nobody_sampled_is_other_time():
    found = profile(log_of(steps_of(30, forward=10, gap_after_forward=5)))
    assert found.phase_time_ns[Phase.OTHER] == 5 * MS


def test_a_gap_is_divided_among_phases_as_its_samples_are(script):
    samples = [
        (1, SLOT_OF["gap_after_optimizer"], line(script, 2), 300),
        (1, SLOT_OF["gap_after_forward"], line(script, 4), 100),
        (1, SLOT_OF["gap_after_backward"], line(script, 6), 250),
    ]
    steps = steps_of(
        60,
        forward=10,
        backward=20,
        optimizer=2,
        gap_after_optimizer=3,
        gap_after_forward=4,
        gap_after_backward=5,
    )
    found = profile(log_of(steps, samples=samples, sites=sites(script)))
    assert {phase: round(ns / MS, 6) for phase, ns in found.phase_time_ns.items() if ns} == {
        Phase.DATA_WAIT: 3,
        Phase.FORWARD: 14,
        Phase.BACKWARD: 20,
        Phase.OPTIMIZER: 2,
        Phase.OTHER: 5,
    }


def test_samples_of_the_warm_up_do_not_count(script):
    gap = SLOT_OF["gap_after_optimizer"]
    log = log_of(
        steps_of(60, forward=10, gap_after_optimizer=6),
        samples=[
            (0, gap, line(script, 6), 10**9),
            (1, gap, line(script, 2), 10),
            (5, gap, line(script, 6), 10),
        ],
        sites=sites(script),
    )
    found = profile(log)
    assert found.phase_time_ns[Phase.DATA_WAIT] == found.phase_time_ns[Phase.OTHER] == 3 * MS


def test_where_all_samples_are_of_the_warm_up_the_last_of_them_stand_for_the_rest(script):
    gap = SLOT_OF["gap_after_optimizer"]
    samples = [(0, gap, line(script, 6), 10**9), (1, gap, line(script, 2), 10)]
    log = log_of(steps_of(60, forward=10), samples=samples)
    assert [weight for _, _, weight in measured_samples(log, warmup=5)] == [10]


def test_samples_that_fell_by_chance_where_one_line_runs_count_as_much_as_its_time(script):
    """Line 6 takes the first 3 of 10 ms of the gap in each step, line 2 the rest."""
    gap = SLOT_OF["gap_after_optimizer"]
    moments = [0.5, 1.0, 1.5, 2.0, 2.5, 2.9] * 40 + [3.2, 4.0, 5.0, 7.0, 9.0] * 10  # too many early ones
    samples = [
        (5, coded(gap, place_of(int(ms * MS))), line(script, 6 if ms < 3 else 2), MS) for ms in moments
    ]
    log = log_of(steps_of(100, gap_after_optimizer=10), samples=samples, meta={"samples": len(samples)})
    weights: dict[int, float] = {}
    for _, stack, weight in measured_samples(log, warmup=5):
        weights[stack[1][1]] = weights.get(stack[1][1], 0) + weight
    assert sum(weights.values()) == pytest.approx(len(samples) * MS), "as much as before"
    assert weights[6] / sum(weights.values()) == pytest.approx(0.3, abs=0.02)
    of_an_older_version = log_of(
        log.steps, samples=[(5, gap, stack, weight) for _, _, stack, weight in samples], meta=log.meta
    )
    plain = [weight for _, _, weight in measured_samples(of_an_older_version, warmup=5)]
    assert plain == [MS] * len(samples)
    of_a_device = replace(log, steps=log.steps // 2, meta={**log.meta, BY_DEVICE: True})
    plain = [weight for _, _, weight in measured_samples(of_a_device, warmup=5)]
    assert plain == [MS] * len(samples), "the moments are the host's, the steps are not"


def test_places_are_in_order_and_end():
    begins = [begins_ns(place) for place in range(1, PLACES + 1)]
    assert begins[0] == 0 and begins == sorted(set(begins))
    for place, begin in enumerate(begins, 1):
        assert place_of(begin) == place and (place == 1 or place_of(begin - 1) == place - 1)
    assert place_of(-5) == 1 and place_of(10**15) == PLACES
    assert decoded(coded(len(SLOTS) - 1, PLACES)) == (len(SLOTS) - 1, PLACES)


def any_log() -> st.SearchStrategy[RankLog]:
    """Records of any times and any samples; no step takes no time at all."""
    count = st.integers(1, 40)
    names = st.tuples(st.sampled_from(["", "/a.py", "/b.py"]), st.integers(0, 9), st.sampled_from("fgh"))
    stack = st.lists(names, max_size=3).map(lambda frames: (NOBODY, *frames))
    code = st.builds(coded, st.integers(0, len(SLOTS) - 1), st.integers(0, PLACES))
    sample = st.tuples(st.integers(0, 45), code, stack, st.integers(1, 10**9))

    def with_times(count: int) -> st.SearchStrategy[RankLog]:
        times = st.lists(
            st.lists(st.integers(0, 10**10), min_size=len(SLOTS), max_size=len(SLOTS)),
            min_size=count,
            max_size=count,
        )
        return st.builds(
            lambda times, samples: log_of(
                np.hstack([np.ones((count, len(COUNTS)), dtype=np.int64), np.array(times) + 1]),
                samples=samples,
            ),
            times,
            st.lists(sample, max_size=30),
        )

    return count.flatmap(with_times)


@settings(max_examples=100, deadline=None, database=None)
@given(any_log(), st.integers(0, 10))
def test_phases_sum_to_the_step_and_shares_to_one_whatever_was_recorded(log, warmup):
    rows = log.steps[warmup:]
    roles = Roles(log.sites, Sources(), log.samples)
    series = phase_series(log, rows, warmup, roles)
    assert set(series) == set(Phase)
    assert all((times >= 0).all() for times in series.values())
    np.testing.assert_allclose(sum(series.values()), step_times(rows), rtol=1e-12)
    for parts in split_gaps(log, warmup, roles).values():
        assert sum(parts.values()) == pytest.approx(1, abs=1e-9)
    found = profile(log, warmup=warmup)
    if found.step_time_ns:
        assert shares(found) == pytest.approx(1, abs=1e-6)
    assert sum(line.share for line in found.where) <= 1 + 1e-6


def test_the_slots_of_a_step_are_the_phases_that_hooks_see_and_the_gaps_after_them():
    assert tuple(phase.value for phase in HOOKED) == SLOTS[:FIRST_GAP]
    assert all(slot.startswith("gap_after_") for slot in SLOTS[FIRST_GAP:])


# -- lines


def test_the_share_of_a_line_is_measured_time_divided_as_the_samples_are(script):
    samples = [
        (1, SLOT_OF["forward"], line(script, 3), 30),
        (1, SLOT_OF["forward"], (NOBODY, ("/model.py", 9, "f"), (script, 3, "<module>")), 10),
        (1, SLOT_OF["backward"], line(script, 5), 1),
    ]
    log = log_of(steps_of(60, forward=80, backward=20), samples=samples, meta={"samples": 41})
    found = source_lines(log, log.steps[1:], 1, Roles(log.sites, Sources()), Places(Sources()))
    assert [(line.phase, line.line, round(line.share, 6)) for line in found] == [
        (Phase.FORWARD, 3, 0.6),
        (Phase.FORWARD, 9, 0.2),
        (Phase.BACKWARD, 5, 0.2),
    ]
    assert [line.text for line in found] == ["out = model(x)", "", "loss.backward()"]
    assert [line.num_samples for line in found] == [30, 10, 1]


def test_the_frame_of_a_package_inside_a_line_is_named(script):
    package = ("/v/lib/python3.11/site-packages/transformers/trainer.py", 2520, "Trainer._inner")
    samples = [(1, SLOT_OF["forward"], (package, (script, 3, "<module>")), 30)]
    (found,) = profile(log_of(steps_of(60, forward=80), samples=samples)).where
    assert found.via == "transformers/trainer.py:2520 Trainer._inner"


def test_the_lines_of_workers_are_shares_of_the_workers_own_time(script):
    log = log_of(
        steps_of(60, data_wait=10),
        worker_samples=[
            ((NOBODY, (script, 2, "load"), (script, 1, "outer")), 75),
            ((NOBODY, (script, 4, "augment")), 25),
            ((NOBODY,), 100),
        ],
    )
    found = worker_lines(log, Sources())
    assert [(line.function, line.share, line.in_worker) for line in found] == [
        ("load", 0.375, True),
        ("augment", 0.125, True),
    ]


def test_a_run_that_nobody_sampled_has_no_lines():
    assert profile(log_of(steps_of(60, forward=80))).where == ()


def test_an_optimizer_is_known_with_the_call_that_made_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("optimizer = torch.optim.AdamW(\n    model.parameters(), lr=args.lr, **extra\n)\n")
    fact = {"kind": "AdamW", "num_tensors": 40, "num_elements": 400, "file": str(path), "line": 1}
    (found,) = profile(
        log_of(steps_of(60, optimizer=80), meta={"facts": {"optimizers": [fact]}})
    ).program.optimizers
    assert found.call == "torch.optim.AdamW(model.parameters(), lr=args.lr, **extra)"


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
