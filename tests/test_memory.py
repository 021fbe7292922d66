"""Which memory counts as kept: what the process wrote, not the pages of a file that it has mapped."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.program import memory_of
from diagnose.launch import vitals
from tests.rank_logs import log_of, steps_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="readings of Linux")

MIB = 2**20
SIZE = 64 * MIB


def readings() -> dict[str, int]:
    return vitals.read(threading.get_ident())


def test_pages_of_a_mapped_file_are_resident_but_not_the_process_own(tmp_path: Path):
    np.zeros(SIZE, dtype=np.uint8).tofile(tmp_path / "rows.bin")
    before = readings()
    mapped = np.memmap(tmp_path / "rows.bin", mode="r")
    total = int(mapped[::512].sum())
    after = readings()
    assert total == 0
    assert after["resident_bytes"] - before["resident_bytes"] > 0.9 * SIZE
    assert after["own_bytes"] - before["own_bytes"] < 0.1 * SIZE


def test_memory_that_was_written_is_the_process_own():
    before = readings()
    kept = np.ones(SIZE, dtype=np.uint8)
    after = readings()
    assert kept[-1] == 1
    assert after["own_bytes"] - before["own_bytes"] > 0.9 * SIZE


@pytest.mark.parametrize(("grows", "growth"), [("resident_bytes", 0), ("own_bytes", 30 * MIB)])
def test_only_growth_of_what_the_process_owns_is_growth(grows: str, growth: int):
    steady = {"resident_bytes": 900 * MIB, "own_bytes": 500 * MIB}
    rows = [(0, step, {**steady, grows: steady[grows] + step * MIB}) for step in range(40)]
    memory = memory_of(log_of(steps_of(40, forward=10), vitals=rows), warmup=0)
    assert memory.growth_bytes == growth
    assert memory.rss_bytes == rows[-1][2]["own_bytes"]


def test_a_run_recorded_before_that_was_told_apart_is_read_as_it_was():
    rows = [(0, step, {"resident_bytes": (900 + step) * MIB}) for step in range(40)]
    assert memory_of(log_of(steps_of(40, forward=10), vitals=rows), warmup=0).growth_bytes == 30 * MIB
