"""Which files are of the newest attempt: several hosts, each with a count of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from diagnose.store.runs import earlier_files, rank_files
from tests.recorded import manifest, steps, writer

BEGAN = 1_700_000_000.0


def attempt(run: Path, ranks: Iterable[int], restart: int, life: tuple[float, float], **facts: Any) -> None:
    """The files of some ranks, written from one second of the job to another."""
    for rank in ranks:
        told = {"elastic": True, "anchor_ns": [0, int((BEGAN + life[0]) * 1e9)], **facts}
        file = writer(run, rank, restart, **told)
        file.add_steps(steps(0, 5))
        file.set_meta({"state": {"updated_unix": BEGAN + life[1]}})
        file.close()


def newest(run: Path) -> list[tuple[int, int]]:
    """Rank and pid of each file that counts."""
    from diagnose.store.reader import read_rank

    logs = [read_rank(path) for path in rank_files(run)]
    return [(log.meta["rank"], log.meta["pid"]) for log in logs]


def test_a_host_whose_workers_did_not_fail_counts_no_restart(tmp_path: Path) -> None:
    """Ranks 0 and 1 fail and are restarted; the agent of ranks 2 and 3 restarts its own with them."""
    run = manifest(tmp_path / "run")
    attempt(run, (0, 1, 2, 3), 0, (0, 100), pid=1)
    attempt(run, (0, 1), 1, (130, 200), pid=2)
    attempt(run, (2, 3), 0, (131, 200), pid=2)
    assert newest(run) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert len(earlier_files(run)) == 4


def test_a_host_that_joins_restarts_all_and_no_agent_counts_it(tmp_path: Path) -> None:
    run = manifest(tmp_path / "run")
    attempt(run, (0, 1), 0, (0, 100), pid=1)
    attempt(run, (0, 1, 2, 3), 0, (120, 200), pid=2)
    assert newest(run) == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_a_helper_beside_a_rank_is_no_attempt(tmp_path: Path) -> None:
    run = manifest(tmp_path / "run")
    attempt(run, (0, 1), 0, (0, 200), pid=1)
    attempt(run, (0,), 0, (5, 30), pid=2)
    attempt(run, (0,), 0, (40, 60), pid=3)
    assert sorted(newest(run)) == [(0, 1), (0, 2), (0, 3), (1, 1)]


@pytest.mark.parametrize("facts", [{"elastic": False}, {"anchor_ns": None}])
def test_where_times_are_not_told_the_count_decides(tmp_path: Path, facts: Mapping[str, Any]) -> None:
    run = manifest(tmp_path / "run")
    attempt(run, (0, 1), 0, (0, 100), pid=1)
    attempt(run, (0, 1), 1, (130, 200), pid=2, **facts)
    assert newest(run) == [(0, 2), (1, 2)]
    attempt(run, (0,), 1, (300, 400), pid=3, **facts)
    assert newest(run) == [(0, 2), (0, 3), (1, 2)], "one process after the other, in a script"
