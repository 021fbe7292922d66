"""docs/settings.md and docs/json.md name exactly what the code knows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from diagnose.core import deep_window, host, input
from diagnose.core.comparison import Change, Comparison, Unit
from diagnose.core.liveness import Liveness, State
from diagnose.core.profile import RunInfo
from diagnose.gate.as_baseline import baseline_json
from diagnose.gate.as_bisect import to_json as bisect_json
from diagnose.gate.as_json import to_json as gate_json
from diagnose.gate.baseline import Baseline
from diagnose.gate.bisection import Bisection, Commit, Ending
from diagnose.gate.fingerprint import Fingerprint
from diagnose.gate.result import GateResult, Metric, Verdict
from diagnose.launch.settings import KEYS, VARIABLE_OF
from diagnose.report import (
    calibration_json,
    comparison_json,
    doctor_json,
    rules_json,
    runs_json,
    status_json,
    to_json,
)
from diagnose.report._action_pages import actions_json
from diagnose.report._json import LINE_KEYS
from diagnose.report._status import KEYS as STATUS_KEYS
from tests.profiles import FAULTY, FOUR_RANKS, PROFILE, RUN, TUNED

DOCS = Path(__file__).parents[1] / "docs"


def first_cells(text: str) -> list[str]:
    """The keys of a page's tables: what stands in code in the first cell of each row."""
    return re.findall(r"^\| `([^`|]+)` \|", text, re.MULTILINE)


def section(heading: str) -> str:
    """What stands below a heading of docs/json.md, up to the next of any rank."""
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


def test_the_page_of_settings_names_each_with_its_variable() -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [(key.replace("_", "-"), VARIABLE_OF[key]) for key in KEYS]
    assert first_cells(text) == [key for key, _ in rows]


REPORT, TRIED = to_json(FAULTY), to_json(TUNED)
COMPARISON = Comparison(
    metrics=(Change(name="step_time", unit=Unit.NS, before=1.0, after=1.0, noise=None),),
    phases=(),
    num_steps=(1, 1),
)
GATE = GateResult(
    verdict=Verdict.PASS, metric=Metric.STEP_MS, asked=Metric.STEP_MS, max_drop=0.03, sides=()
)
COMMIT = Commit(hash="0", subject="")
BISECTION = Bisection(ending=Ending.NO_LOSS, good=COMMIT, commits=(COMMIT,))

TOLD: dict[str, Iterable[str]] = {
    "`diagnose report`, and `diagnose run --json`": REPORT,
    "`throughput`": REPORT["throughput"],
    "`steps`": REPORT["steps"],
    "`where[]`": LINE_KEYS,
    "`findings[]`": REPORT["findings"][0],
    "`trials[]`": TRIED["trials"][0],
    "`tuning`": TRIED["tuning"],
    "`run`": names(RunInfo),
    "`input`": names(input.InputStats),
    "`input.own`": names(input.OwnLoading),
    "`input.workers`": names(input.WorkerStats),
    "`input.workers.slowest[]`": names(input.SlowBatch),
    "`input.workers.reading`": names(input.Reading),
    "`host`": names(host.HostStats),
    "`host.python_threads[]`": names(host.PythonThread),
    "`deep_window`": [*names(deep_window.DeepWindow), "mfu"],
    "`deep_window.counted`": names(deep_window.Counted),
    "`deep_window.counted.work[]`": names(deep_window.Work),
    "`deep_window.trace`": names(deep_window.Trace),
    "`deep_window.trace.classes[]`": names(deep_window.ClassTime),
    "`deep_window.trace.top[]`": names(deep_window.Hot),
    "`deep_window.trace.syncs[], deep_window.counted.lines[]`": names(deep_window.Sync),
    "`deep_window.rates`": names(deep_window.Rates),
    "`diagnose status`": set(status_json(PROFILE, Liveness(state=State.ENDED))) - set(STATUS_KEYS),
    "`diagnose runs`": runs_json([]),
    "`diagnose compare`": comparison_json(COMPARISON, (RUN, RUN)),
    "`diagnose rules`": rules_json({}),
    "`diagnose rules --calibration`": calibration_json([]),
    "`diagnose actions`": actions_json({}, {}),
    "`diagnose doctor`": doctor_json([], []),
    "`diagnose gate`": gate_json(GATE),
    "`diagnose bisect`": bisect_json(BISECTION),
    "`diagnose baseline show`": baseline_json(Path(), Baseline(fingerprint=Fingerprint())),
}


@pytest.mark.parametrize("heading", TOLD)
def test_the_page_of_answers_names_the_keys_that_are_written(heading: str) -> None:
    assert sorted(first_cells(section(heading))) == sorted(TOLD[heading])


def test_each_heading_of_the_page_of_answers_is_compared() -> None:
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^##+ (.+)$", text, re.MULTILINE)) == sorted(TOLD)


@pytest.mark.parametrize(
    ("heading", "key", "told"),
    [
        ("`diagnose report`, and `diagnose run --json`", "phases", REPORT["phases"][0]),
        ("`diagnose report`, and `diagnose run --json`", "clock", REPORT["clock"]),
        ("`diagnose report`, and `diagnose run --json`", "overhead", REPORT["overhead"]),
        ("`diagnose report`, and `diagnose run --json`", "confirmation", TRIED["confirmation"]),
        (
            "`diagnose report`, and `diagnose run --json`",
            "ranks",
            to_json(replace(PROFILE, ranks=FOUR_RANKS))["ranks"][0],
        ),
        ("`tuning`", "after", TRIED["tuning"]["after"]),
        ("`findings[]`", "gain", REPORT["findings"][0]["gain"]),
        ("`diagnose status`", "live", status_json(PROFILE, Liveness(state=State.ENDED))["live"]),
        ("`diagnose runs`", "runs", runs_json([("a", PROFILE)])["runs"][0]),
        ("`diagnose compare`", "metrics", comparison_json(COMPARISON, (RUN, RUN))["metrics"][0]),
        ("`diagnose bisect`", "commits", bisect_json(BISECTION)["commits"][0]),
    ],
)
def test_a_key_that_holds_others_names_them(heading: str, key: str, told: dict[str, Any]) -> None:
    (row,) = re.findall(rf"^\| `{key}` \|(.*)$", section(heading), re.MULTILINE)
    assert set(told) <= set(re.findall(r"`(\w+)`", row))
