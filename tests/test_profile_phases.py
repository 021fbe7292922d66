"""From records to the phases of a step and its lines: samples divide what hooks left as gaps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.gaps import measured_samples, split_gaps
from diagnose.analysis.lines import source_lines, worker_lines
from diagnose.analysis.steps import phase_series, step_times
from diagnose.core.ledger import COUNTS, FIRST_GAP, HOOKED, SLOT_OF, SLOTS
from diagnose.core.phases import Phase
from diagnose.core.places import PLACES, begins_ns, coded, decoded, place_of
from diagnose.core.profile import Profile, Status
from diagnose.source.places import Places
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog
from tests.rank_logs import MS, NOBODY, log_of, profile, steps_of


def shares(profile: Profile) -> float:
    return sum(profile.share(phase) or 0.0 for phase in Phase)


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
