"""Limits: the script ends, or is measured no more, after so many steps of any kind of loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.fakes import SlowData, SlowModel, SlowOptimizer, measured
from tests.training_loops import batch, ended

pytest_plugins = ("tests.training_loops",)


def loops() -> dict[str, Callable[..., None]]:
    """Endless loops; each calls `made()` once for each whole optimizer step."""

    def with_loader(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        while True:
            for rows in DataLoader(SlowData(model.clock, num_rows=6, fetch_ns=1), batch_size=2):
                model(rows).sum().backward()
                optimizer.step()
                made()

    def without_loader(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        while True:
            model(batch()).sum().backward()
            optimizer.step()
            made()

    def one_batch_for_ever(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        rows = next(iter(DataLoader(SlowData(model.clock, num_rows=6, fetch_ns=1), batch_size=2)))
        while True:
            model(rows).sum().backward()
            optimizer.step()
            made()

    def accumulating(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        while True:
            for _ in range(3):
                model(batch()).sum().backward()
            optimizer.step()
            made()

    def in_a_closure(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        def closure() -> Any:
            loss = model(batch()).sum()
            loss.backward()
            return loss

        while True:
            optimizer.step(closure)
            made()

    def without_a_module(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        while True:
            (model.layer.weight * 2).sum().backward()
            optimizer.step()
            made()

    def with_two_optimizers(model: SlowModel, optimizer: Any, made: Callable[[], None]) -> None:
        other = SlowModel(model.clock)
        for_other = SlowOptimizer(model.clock, other, 5)
        while True:
            other(batch()).sum().backward()
            for_other.step()
            model(batch()).sum().backward()
            optimizer.step()
            made()

    return {function.__name__: function for function in vars().values() if callable(function)}


@pytest.mark.parametrize("loop", loops())
@pytest.mark.parametrize("limit", [2, 5])
def test_stop_after_ends_the_script_cleanly_after_so_many_steps(clock, model, optimizer, loop, limit):
    made: list[int] = []
    with measured(clock, stop_after=limit) as recorder:
        with pytest.raises(SystemExit) as exit_:
            loops()[loop](model, optimizer, lambda: made.append(1))
        assert exit_.value.code == 0
        steps = ended(recorder)
    assert len(made) == limit
    assert len(steps) == limit


@pytest.mark.parametrize("loop", loops())
def test_max_steps_ends_the_measuring_and_not_the_script(clock, model, optimizer, loop):
    made: list[int] = []

    def stop_at_ten() -> None:
        made.append(1)
        if len(made) == 10:
            raise KeyboardInterrupt

    with measured(clock, max_steps=3) as recorder:
        with pytest.raises(KeyboardInterrupt):
            loops()[loop](model, optimizer, stop_at_ten)
        written = len(recorder.log)
        steps = ended(recorder)
    assert len(made) == 10
    assert len(steps) == 3
    assert written < 120, "nothing is measured any more"
