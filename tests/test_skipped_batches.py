"""A loop that scores its batches and leaves some out goes on to train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

from tests.fakes import FakeClock, SlowData, SlowModel, SlowOptimizer, Step, measured, steps_of

FETCH = 7


def steps_with(is_skipped: Callable[[int], bool]) -> list[Step]:
    clock = FakeClock()
    with measured(clock) as recorder:
        model = SlowModel(clock, forward_ns=100, backward_ns=200)
        optimizer = SlowOptimizer(clock, model, step_ns=10)
        for rows in DataLoader(SlowData(clock, num_rows=24, fetch_ns=FETCH), batch_size=2):
            with torch.no_grad():
                model(rows)
            if is_skipped(int(rows[0, 0]) // 2):
                continue
            model(rows).sum().backward()
            optimizer.step()
        recorder.finish()
        return steps_of(recorder)


@pytest.mark.parametrize("skipped", [0, 3])
def test_after_a_batch_that_is_left_out_the_loop_waits_for_data_as_before(skipped):
    steps = steps_with(lambda number: number == skipped)
    assert len(steps) == 11
    assert [step.samples for step in steps[skipped + 1 :]] == [2] * len(steps[skipped + 1 :])
    waits = [step.times.get("data_wait", 0) for step in steps]
    # The batch after it is not known to be trained on when it is asked for.
    assert waits[skipped + 1 :] == [2 * FETCH] * len(waits[skipped + 1 :])


def test_an_iterator_that_is_only_evaluated_is_known_when_it_begins_anew():
    """As that of a loader does whose workers stay; training asks no loader in between."""
    clock = FakeClock()
    with measured(clock, "backward", "dataloader", "forward", "optimizer") as recorder:
        model = SlowModel(clock)
        optimizer = SlowOptimizer(clock, model, step_ns=10)
        held_out = DataLoader(SlowData(clock, 3, FETCH), num_workers=1, persistent_workers=True)
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            for rows in held_out:
                with torch.no_grad():
                    model(rows)
        recorder.finish()
        steps_of(recorder)
        # The first of all cannot be told from a training batch when it is asked for.
        assert recorder.log.batches == 1
