"""A part of a run is told as if it were all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diagnose.analysis.deep_window import without_steps
from diagnose.analysis.loading import input_stats
from diagnose.analysis.meetings import waits_of
from diagnose.analysis.spans import part_of
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.store.reader import RankLog

EPOCH = 16


def short_epochs(num_steps: int = 20 * EPOCH) -> RankLog:
    """Steps of 10 ms; the first of each epoch waits 100 ms for its batch."""
    steps = np.zeros((num_steps, len(COLUMNS)), dtype=np.int64)
    begins = np.arange(num_steps) % EPOCH == 0
    steps[:, COLUMNS.index(Phase.DATA_WAIT.value)] = np.where(begins, 100_000_000, 1_000_000)
    steps[:, COLUMNS.index(Phase.FORWARD.value)] = 9_000_000
    starts = [[step, step, 1] for step in range(0, num_steps, EPOCH)]
    loader = {"begun_at": num_steps - EPOCH, "steps": num_steps, "epochs": 20, "starts": starts}
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
