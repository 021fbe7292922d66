"""Slow samples that the training thread makes itself, without workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.rules._engine import diagnosed
from diagnose.rules._serial_examples import ON_ONE_CPU, loading, pieces, prepared
from diagnose.rules.slow_samples import BURSTS, STANDS_STILL
from tests.findings import INPUT, RULES, first

MS = 1e6


def found(run: Profile) -> list[str]:
    return [finding.rule for finding in diagnosed(run).findings]


def test_long_waits_now_and_then_are_slow_samples_and_not_that_there_are_no_workers():
    assert found(loading(40, stats=BURSTS)) == ["slow-samples"]
    assert found(loading(40, stats=BURSTS, own=prepared())) == ["slow-samples"]
    assert found(loading(40, stats={"burst_ns": 0.0, "burst_share": 0.0})) == ["serial-loading"]
    assert found(loading(40, stats=BURSTS, loader={"iterable": True})) == ["serial-loading"], "a shard"
    assert found(loading(40, stats={**BURSTS, "burst_period": 10})) == ["serial-loading"]
    assert found(loading(40, stats={**BURSTS, "late_wait_ns": 9 * MS})) == ["serial-loading"], "kept"
    assert found(loading(3, stats={"burst_ns": 2 * MS, "burst_share": 0.1})) == []


def test_slow_samples_cost_what_comes_beyond_the_usual_wait_and_workers_are_offered_too():
    finding = first(diagnosed(loading(40, stats=BURSTS, host=ON_ONE_CPU)))
    alone = first(diagnosed(loading(40, host=ON_ONE_CPU)))
    assert finding.lost_ns == {Phase.DATA_WAIT: 30 * MS}
    assert alone.rule == "serial-loading"
    assert set(finding.actions) == set(alone.actions) > set(finding.won_ns)
    assert dict(finding.won_ns) == dict(alone.won_ns)
    assert "10 % of the steps wait 300 ms longer than usual" in " ".join(finding.evidence)


def test_of_samples_that_workers_prepare_anew_both_are_told():
    rule = RULES["slow-samples"]
    by_workers = rule.fires_on[0]
    for run, explained in ((loading(40, stats=BURSTS), True), (by_workers, False)):
        named = rule.explained(first(diagnosed(run)), run)
        assert ("repeated-preparation" in named) is explained
        assert "slow-storage" in named


class Waves(Dataset[Any]):
    """Rows of numbers, some of which take long to repair."""

    def __init__(self, broken: set[int], usual_ms: float) -> None:
        self.broken, self.usual_ms = broken, usual_ms

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep((60 if index in self.broken else self.usual_ms) / 1000)
        return torch.full((4,), float(index))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("broken", "usual_ms", "name"),
    [({5, 31, 64, 77, 120, 131, 178, 200, 222}, 0.1, "slow-samples"), (set(), 2.5, "serial-loading")],
)
def test_a_real_run_tells_slow_samples_from_samples_that_all_take_long(
    tmp_path: Path, broken: set[int], usual_ms: float, name: str
):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        Waves(broken, usual_ms), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    diagnose.attach(tmp_path / "run")
    try:
        for _ in range(2):
            for rows in loader:
                model(rows).sum().backward()
                optimizer.step()
                time.sleep(0.01)
    finally:
        run = diagnose.detach()
    assert [finding.rule for finding in run.findings if finding.rule in INPUT] == [name]


def test_long_waits_in_which_the_sampler_draws_are_no_slow_samples():
    waits = {"burst_ns": 8 * MS, "burst_share": 0.1, "steady_wait_ns": 14 * MS, "fetch_ns": 6 * MS}
    assert "slow-samples" in found(loading(14, stats=waits))
    assert "slow-samples" not in found(loading(14, stats={**waits, "own_drawing_ns": 8 * MS}))


def test_long_waits_in_which_files_are_read_are_of_the_storage():
    assert found(loading(40, stats=BURSTS, own=pieces())) == ["slow-storage"]
    few = pieces(reads=96.0, read_bytes=2e6)
    assert found(loading(40, stats=BURSTS, own=few)) == ["slow-samples"], "it computes"
    assert found(loading(40, stats=BURSTS, own=few, host=STANDS_STILL)) == ["slow-storage"]
    parsed = pieces(reading_share=0.3)
    assert found(loading(40, stats=BURSTS, own=parsed, host=STANDS_STILL)) == ["slow-samples"]
