"""The page of the gate's history: which files it reads, and where it sees the level change."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from diagnose.dashboards._baselines import RATE, baselines_beside, machine_in_words, rated

from diagnose.analysis.steps_in_history import level_changes
from diagnose.gate.baseline import Baseline


def history(*levels: tuple[float, int], scatter: float = 0.01, seed: int = 0) -> list[float]:
    """So many measurements of each level, each off by a random part of it."""
    noise = random.Random(seed)
    return [level * (1 + scatter * noise.gauss(0, 1)) for level, count in levels for _ in range(count)]


@pytest.mark.parametrize(
    "values, expected",
    [
        (history((400, 12), (360, 8)), [12]),
        (history((400, 12), (360, 8), (420, 10)), [12, 20]),
        (history((400, 9), (430, 3)), [9]),
        (history((400, 30)), []),
        (history((400, 15), (396, 15)), []),
        (history((400, 10), (300, 2), (400, 10)), []),
        (history((400, 10), (360, 10), scatter=0.08), []),
        ([400.0], []),
        ([], []),
    ],
    ids=["slower", "and faster", "lately", "level", "too little", "two bad days", "noise", "one", "none"],
)
def test_a_change_of_level_is_seen_where_it_began(values: list[float], expected: list[int]) -> None:
    assert level_changes(values) == expected


def test_a_level_history_is_rarely_divided() -> None:
    wrong = sum(bool(level_changes(history((400, 30), scatter=0.02, seed=seed))) for seed in range(200))
    assert wrong <= 4, "2 % of 200"


def stored(**changes: object) -> str:
    entry = {"when": "2026-11-01T10:00:00+00:00", "commit": "ab" * 20, "branch": "main"}
    entries = [{**entry, "metrics": {"samples_per_s": 400.0}, "runs": [{"samples_per_s": 398.0}, {}]}]
    hard = {"command": "train.py", "cpus": 2.0, "cuda": "", "gpus": []}
    return json.dumps({"schema": 1, "fingerprint": {"hard": hard}, "entries": entries, **changes})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "baselines").mkdir()
    return tmp_path / "runs"


def test_a_baseline_is_read_with_what_it_holds_for(root: Path) -> None:
    (root.parent / "baselines" / "a.json").write_text(stored())
    baseline = baselines_beside(root)["a"]
    assert isinstance(baseline, Baseline)
    assert machine_in_words(baseline.fingerprint.hard) == "cpus 2"
    (entry,) = rated(baseline)
    assert (entry.metrics[RATE], entry.commit[:4]) == (400.0, "abab")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"entries": 5}', '{"entries": [5]}', '{"entries": [{"metrics": 5}]}', "\x00"],
)
def test_a_damaged_baseline_is_named_and_the_others_are_shown(root: Path, text: str) -> None:
    (root.parent / "baselines" / "a.json").write_text(text)
    (root.parent / "baselines" / "b.json").write_text(stored())
    known = baselines_beside(root)
    assert "a.json is not a baseline" in str(known["a"])
    assert isinstance(known["b"], Baseline) and rated(known["b"])


def test_an_entry_without_a_rate_is_left_out(root: Path) -> None:
    entry = {"when": "", "commit": "", "branch": "", "metrics": {"step_ms": 5.0}, "runs": []}
    (root.parent / "baselines" / "a.json").write_text(stored(entries=[entry]))
    baseline = baselines_beside(root)["a"]
    assert isinstance(baseline, Baseline) and baseline.entries and not rated(baseline)
