"""Which samples are to be fetched is drawn on the training thread, whoever fetches: how long it takes."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import diagnose
from diagnose.core.profile import Profile

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone"),
]

MS = 1_000_000
ROWS = TensorDataset(torch.zeros(160, 4))


class SlowStart(Sampler[int]):
    """Draws the order of an epoch at once.

    Attributes:
        took_ns: What each time has taken.
    """

    def __init__(self) -> None:
        self.took_ns: list[int] = []

    def __iter__(self) -> Iterator[int]:
        begun_ns = time.perf_counter_ns()
        time.sleep(0.5)
        self.took_ns.append(time.perf_counter_ns() - begun_ns)
        return iter(range(len(ROWS)))

    def __len__(self) -> int:
        return len(ROWS)


class SlowBatches(Sampler[list[int]]):
    """Draws a batch when it is asked for.

    Attributes:
        took_ns: What each has taken.
    """

    def __init__(self) -> None:
        self.took_ns: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, len(ROWS), 4):
            begun_ns = time.perf_counter_ns()
            self.order = sorted(range(60_000), key=lambda row: -row)
            self.took_ns.append(time.perf_counter_ns() - begun_ns)
            yield list(range(first, first + 4))

    def __len__(self) -> int:
        return len(ROWS) // 4


class DrawnBefore(SlowBatches):
    """Draws the batches of an epoch before the first one is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        begun_ns = time.perf_counter_ns()
        time.sleep(0.25)  # torch asks for it twice where workers are new
        self.took_ns.append(time.perf_counter_ns() - begun_ns)
        return iter([list(range(first, first + 4)) for first in range(0, len(ROWS), 4)])


def profile_of(run_dir: Path, *, epochs: int, **arguments: Any) -> Profile:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(ROWS, **{"num_workers": 2, **arguments})
    diagnose.attach(run_dir)
    for _ in range(epochs):
        for (rows,) in loader:
            model(rows).sum().backward()
            optimizer.step()
    return diagnose.detach()


def rules(profile: Profile) -> list[str]:
    return [finding.rule for finding in profile.findings]


@pytest.mark.parametrize("drawing", [SlowStart, DrawnBefore])
def test_an_order_that_is_drawn_for_long_is_no_start_of_workers(tmp_path, drawing):
    sampler = drawing()
    as_argument = (
        {"sampler": sampler, "batch_size": 4} if drawing is SlowStart else {"batch_sampler": sampler}
    )
    found = profile_of(tmp_path / "run", epochs=4, **as_argument)
    stats = found.input
    assert stats.epoch_drawing_ns is not None and stats.drawing_ns is not None
    each_ns = stats.epoch_drawing_ns * found.steps.measured / stats.epoch_starts
    assert each_ns == pytest.approx(sum(sampler.took_ns) / 4, rel=0.15)
    assert stats.drawing_ns < 1 * MS
    assert "epoch-boundary-stall" in rules(found)
    assert "worker-startup" not in rules(found)


def test_batches_that_are_drawn_for_long_are_not_made_by_slow_workers_nor_handed_over_slowly(tmp_path):
    batches = SlowBatches()
    found = profile_of(tmp_path / "run", epochs=3, batch_sampler=batches, persistent_workers=True)
    stats = found.input
    assert stats.drawing_ns is not None and stats.steady_wait_ns is not None
    assert stats.drawing_ns == pytest.approx(0.9 * sum(batches.took_ns) / 120, rel=0.3), (
        "all but four of forty are drawn later"
    )
    assert stats.drawing_ns < stats.steady_wait_ns
    assert "slow-batch-building" in rules(found)
    assert "worker-transfer" not in rules(found)


def test_an_order_that_torch_draws_takes_no_time_worth_the_name(tmp_path):
    found = profile_of(tmp_path / "run", epochs=3, batch_size=4, shuffle=True, persistent_workers=True)
    stats = found.input
    assert stats.drawing_ns is not None and stats.epoch_drawing_ns is not None
    assert stats.drawing_ns < 1 * MS
    assert stats.epoch_drawing_ns < 1 * MS


def test_batches_that_are_drawn_for_long_are_not_fetched_slowly_where_there_are_no_workers(tmp_path):
    batches = SlowBatches()
    found = profile_of(tmp_path / "run", epochs=3, batch_sampler=batches, num_workers=0)
    stats = found.input
    assert stats.own_drawing_ns is not None and stats.drawing_ns is None
    assert stats.own_drawing_ns == pytest.approx(39 / 40 * sum(batches.took_ns) / 120, rel=0.3)
    assert stats.fetch_ns is not None and stats.fetch_ns < 0.3 * stats.own_drawing_ns
    assert "slow-batch-building" in rules(found)
    assert not {"serial-loading", "repeated-preparation"} & set(rules(found))
    (finding,) = (each for each in found.findings if each.rule == "slow-batch-building")
    assert Path(finding.file) == Path(__file__)
    assert "Let the sampler draw" in finding.fix


class SlowRows(TensorDataset):
    """Rows that take some time to fetch."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.003)
        return super().__getitem__(index)


def test_an_order_that_torch_draws_leaves_slow_samples_to_the_loader_without_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROWS", SlowRows(*ROWS.tensors))
    found = profile_of(tmp_path / "run", epochs=2, batch_size=4, shuffle=True, num_workers=0)
    assert found.input.own_drawing_ns is not None and found.input.own_drawing_ns < 0.2 * MS
    assert "serial-loading" in rules(found)
    assert "slow-batch-building" not in rules(found)


class Reader:
    """What a dataset has its samples made by."""

    def decode(self, rows: Any) -> Any:
        for _ in range(15):
            self.order = sorted(range(2000), key=lambda row: -row)
        return rows


def decode(rows: Any) -> Any:
    return Reader().decode(rows)


class DecodedRows(TensorDataset):
    """Rows that others make: four of them take twice as long as the sampler does for a batch."""

    def __getitem__(self, index: Any) -> Any:
        return decode(super().__getitem__(index))


def test_the_lines_of_what_is_drawn_are_the_samplers_not_those_of_what_the_dataset_calls(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules[__name__], "ROWS", DecodedRows(*ROWS.tensors))
    found = profile_of(tmp_path / "run", epochs=2, batch_sampler=SlowBatches(), num_workers=0)
    (finding,) = (each for each in found.findings if each.rule == "slow-batch-building")
    lines, first = inspect.getsourcelines(SlowBatches)
    assert first <= finding.line < first + len(lines)
    assert "SlowBatches.__iter__" in finding.evidence[0]
    assert "ecode" not in " ".join([finding.summary, finding.fix, *finding.evidence])
