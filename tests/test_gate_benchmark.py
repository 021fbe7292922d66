"""The benchmark of the gate: which gates it runs, and what its page says of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gate

    yield gate
    for name in ("gate", "gate_peers", "gate_simulation"):
        sys.modules.pop(name, None)


def test_each_phase_is_slowed_by_each_size_equally_often(gate: Any) -> None:
    cases = gate.cases(("as it is",), 40, 45)
    assert len({case.key for case in cases}) == len(cases) == 85
    slowed = Counter((case.phase, case.size) for case in cases if case.phase)
    assert set(slowed.values()) == {3}
    assert len(slowed) == 15
    assert {bool(case.phase) for case in cases[:8]} == {False, True}, "any beginning has some of both"


def row(key: str, phase: str, verdict: str, others: dict[str, list[bool]], **more: Any) -> dict[str, Any]:
    fixed = {"scene": "as it is", "pairs": 7, "cpus": 2, "machine": "x86_64", "day": "2026-11-21"}
    size = 0.1 if phase else 0.0
    return {"key": key, "phase": phase, "size": size, "verdict": verdict, "others": others} | fixed | more


def test_the_page_counts_verdicts_alarms_and_names(gate: Any) -> None:
    noisy = {"pytest-benchmark mean": [True, False, False, False]}
    rows = [
        row("a", "", "pass", noisy, truth=0.0),
        row("b", "", "inconclusive", noisy, truth=0.0),
        row("c", "data", "regression", noisy, truth=0.098, why="phases", named=["data_wait", "other"]),
        row("d", "forward", "regression", noisy, truth=0.102, why="cannot_tell", named=[]),
    ]
    page = gate.page(rows, 0)
    names = list(gate.rules())
    shares = " | ".join("25%" if name == "pytest-benchmark mean" else "-" for name in names)
    assert f"| as it is | nothing |  | 2 | 1 | 0 | 1 | 7.0 | {shares} |" in page
    assert f"| as it is | 10% | 10.0% | 2 | 0 | 2 | 0 | 7.0 | {shares} |" in page
    assert "Of 2 regressions found, the phase that was made slower is named first in 1." in page
    assert "- d: none (cannot tell)" in page


def test_what_others_say_is_asked_of_their_own_rules(gate: Any) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    base = rng.normal(100, 1, 200)
    for name, rule in gate.rules().items():
        assert rule(base, base * 1.1, 0.03), name
        assert not rule(base, base, 0.03), name
