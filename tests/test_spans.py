"""A part of a run is told as if it were all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.deep_window import without_steps
from diagnose.analysis.loaders import evaluating_of
from diagnose.analysis.loading import input_stats
from diagnose.analysis.meetings import waits_of
from diagnose.analysis.spans import part_of
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.workers import NOT_TRAINING
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog

EPOCH = 16
MS = 1_000_000


def short_epochs(told: int = 20) -> RankLog:
    """Steps of 10 ms; the first of each epoch waits 100 ms for its batch. Of `told` is known where."""
    num_steps = 20 * EPOCH
    steps = np.zeros((num_steps, len(COLUMNS)), dtype=np.int64)
    begins = np.arange(num_steps) % EPOCH == 0
    steps[:, COLUMNS.index(Phase.DATA_WAIT.value)] = np.where(begins, 100_000_000, 1_000_000)
    steps[:, COLUMNS.index(Phase.FORWARD.value)] = 9_000_000
    starts = [[step, step, 1] for step in range(0, num_steps, EPOCH)][:told]
    loader = {"begun_at": num_steps - EPOCH, "steps": num_steps, "epochs": 20, "starts": starts}
    loader["starts_end"] = told * EPOCH if told < 20 else None
    meta = {"facts": {"loaders": [loader]}, "counters": {"batches": num_steps + 40}}
    return RankLog(path=Path(), steps=steps, meta=meta)


def test_the_beginnings_of_epochs_are_found_in_a_part_of_a_run():
    """The tuner asks about the steps since a change: these begin anywhere in an epoch."""
    whole = input_stats(short_epochs(), 0)
    assert whole.epoch_starts == 20
    for first in (3, 10, EPOCH, 5 * EPOCH + 1):
        part = input_stats(part_of(short_epochs(), first), 0)
        assert part.epoch_starts == 20 - -(-first // EPOCH)
        assert part.steady_wait_ns == 1_000_000
        assert part.epoch_start_ns is not None and part.epoch_start_ns > 5_000_000


def test_of_very_many_epochs_the_first_beginnings_stand_for_all():
    whole, some = input_stats(short_epochs(), 0), input_stats(short_epochs(told=8), 0)
    assert some.epoch_starts == 20
    assert some.epoch_start_ns == whole.epoch_start_ns
    assert some.steady_wait_ns == whole.steady_wait_ns == 1_000_000
    part = input_stats(part_of(short_epochs(told=8), 3 * EPOCH + 1), 0)
    assert 14 <= part.epoch_starts <= 18, "of 16"
    assert part.steady_wait_ns == 1_000_000
    late = input_stats(part_of(short_epochs(told=8), 8 * EPOCH), 0)
    assert late.epoch_starts == 0, "where none is known none is told"


@pytest.mark.parametrize(
    ("persistent", "asks", "waits_ns"),
    [(False, 3, (5e7, 0.0)), (True, 3, (0.0, 5e7)), (True, 2, (5e7, 0.0))],
)
def test_epochs_of_one_batch_wait_for_their_workers_to_start(persistent, asks, waits_ns):
    """Each asks for its iterator, its batch, and in vain for another, unless it is left before."""
    log = short_epochs()
    log.steps[:, COLUMNS.index(Phase.DATA_WAIT.value)] = 50_000_000
    (loader,) = log.meta["facts"]["loaders"]
    starts = [[step, step, 1] for step in range(len(log.steps))]
    loader.update(num_workers=4, persistent_workers=persistent, epochs=len(starts), starts=starts)
    log.meta["counters"]["batches"] = asks * len(starts)
    stats = input_stats(log, 0)
    assert stats.epoch_starts == len(starts)
    assert (stats.epoch_start_ns, stats.steady_wait_ns) == waits_ns


def test_they_are_found_where_steps_are_left_out():
    log = without_steps(short_epochs(), ((20, 40),))
    stats = input_stats(log, 0)
    assert stats.epoch_starts == 19, "one began in what is left out"
    assert stats.steady_wait_ns == 1_000_000


def test_a_meeting_of_a_step_that_is_left_out_is_none_of_the_next_step():
    ends = 10_000_000 * np.arange(1, 101)
    steps = np.zeros((100, len(COLUMNS)), dtype=np.int64)
    steps[:, COLUMNS.index("end_ns")] = ends
    steps[:, COLUMNS.index(Phase.FORWARD.value)] = 8_000_000
    steps[:, COLUMNS.index(Phase.COMMUNICATION.value)] = 2_000_000
    log = RankLog(path=Path(), steps=steps, meetings=np.stack([ends - 2_000_000, ends], axis=1))
    assert waits_of(without_steps(log, ((40, 60),)), 0).tolist() == [2_000_000] * 79
    assert waits_of(log, 10).tolist() == [2_000_000] * 90


def test_the_whole_log_keeps_its_own():
    log = short_epochs()
    part_of(log, 10)
    assert len(log.meta["facts"]["loaders"][0]["starts"]) == 20


@pytest.mark.parametrize("regular", [True, False])
def test_without_a_loader_steps_that_come_regularly_may_begin_epochs(regular: bool) -> None:
    """Those that take long by chance come as they like."""
    rng, num_steps = np.random.default_rng(0), 20 * EPOCH
    steps = np.zeros((num_steps, len(COLUMNS)), dtype=np.int64)
    steps[:, COLUMNS.index(Phase.BACKWARD.value)] = 9_000_000
    long = np.arange(0, num_steps, EPOCH) if regular else rng.choice(num_steps, 20, replace=False)
    gaps = COLUMNS.index("gap_after_optimizer")
    steps[:, gaps] = rng.integers(900_000, 1_100_000, num_steps)
    steps[long, gaps] += 32_000_000
    stats = input_stats(RankLog(path=Path(), steps=steps, meta={}), 0)
    if not regular:
        assert (stats.epoch_starts, stats.epoch_start_gap_ns) == (0, None)
    else:
        assert stats.epoch_starts == 20
        assert stats.epoch_start_gap_ns == pytest.approx(2e6, rel=0.05), "of all steps"
        assert stats.steady_gap_ns == pytest.approx(1e6, rel=0.05)


def test_evaluations_that_started_workers_belong_to_the_part_of_the_run_in_which_they_began():
    loader = {
        "num_workers": 2,
        "epochs": 3,
        "starts_end": None,
        "starts": [[n, n, MS] for n in (4, 44, 84)],
    }
    report = {"loader": NOT_TRAINING, "batches": 2, "fetch_ns": MS, "collate_ns": 0}
    log = replace(short_epochs(), workers=[report])
    log.meta["facts"]["evaluating"] = [loader]
    (whole,) = evaluating_of(log, 0, Sources({}))
    (part,) = evaluating_of(part_of(log, 40), 0, Sources({}))
    assert (whole.starts, part.starts) == (3, 2)
    assert part.start_ns == pytest.approx(2 * MS / 2 / len(part_of(log, 40).steps))
