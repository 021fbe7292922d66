"""Predicted beside measured gain: the ledger, `compare`, and `rules --calibration`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.compare import StepSeries, compare
from diagnose.analysis.predictions import prediction
from diagnose.cli.main import main
from diagnose.core.comparison import Comparison
from diagnose.core.finding import Finding, Gain
from diagnose.core.phases import Phase
from diagnose.core.prediction import Prediction
from diagnose.core.profile import Profile
from diagnose.core.units import format_gain
from diagnose.report import FaultChanges, Terminal, calibration_text, comparison_json, comparison_text
from diagnose.rules import profile
from diagnose.store.gains import ledger_path, note_prediction, read_predictions
from tests.profiles import SERIAL, assert_lines

MS = 1_000_000
TRIED = Prediction(
    rules=("serial-loading",),
    predicted=Gain(speedup=1.6, low=1.4, high=1.8),
    measured=Gain(speedup=1.5, low=1.3, high=1.7),
    measured_by="samples_per_s",
    before="a 2026-11-20T14:15:02+01:00",
    after="b 2026-11-20T15:15:02+01:00",
    noted_unix=1.0,
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the ledger that is nobody's home."""
    monkeypatch.setenv("DIAGNOSE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def fault(lost_ms: float) -> Finding:
    return replace(
        SERIAL,
        lost_ns={Phase.DATA_WAIT: lost_ms * MS},
        low_ns=0.8 * lost_ms * MS,
        high_ns=1.1 * lost_ms * MS,
    )


def run(step_ms: float, *findings: Finding, **changes: Any) -> Profile:
    judged = profile(step_ms=step_ms, data_wait_ms=0.45 * step_ms)
    return replace(judged, findings=findings, **{"num_rules": 9, **changes})


def compared(before_ms: float, after_ms: float) -> Comparison:
    def steady(step_ms: float) -> StepSeries:
        times = np.full(200, step_ms * MS)
        return StepSeries(
            step_time_ns=times, phase_time_ns={Phase.FORWARD: times}, samples=np.full(200, 32)
        )

    return compare(steady(before_ms), steady(after_ms))


def test_a_fault_that_is_gone_sets_its_prediction_beside_what_was_measured() -> None:
    tried = prediction(run(100, fault(40)), run(62), compared(100, 62))
    assert tried is not None
    assert tried.rules == ("serial-loading",)
    promised = (tried.predicted.speedup, tried.predicted.low, tried.predicted.high)
    assert promised == pytest.approx((1 / 0.6, 1 / 0.68, 1 / 0.56))
    assert tried.measured.speedup == pytest.approx(100 / 62)
    assert tried.measured.low < 100 / 62 < tried.measured.high
    assert tried.is_inside


def test_a_fix_that_wins_a_part_of_what_is_lost_promises_that_part() -> None:
    part = replace(fault(40), fix_won_ns=20 * MS)
    tried = prediction(run(100, part), run(79), compared(100, 79))
    assert tried is not None and tried.is_inside
    promised = (tried.predicted.speedup, tried.predicted.low, tried.predicted.high)
    assert promised == pytest.approx((1 / 0.8, 1 / 0.8, 1 / 0.56))
    assert part.gain(100 * MS).speedup == pytest.approx(1 / 0.6), "as before, of the fault's end"
    shared = replace(part, lost_ns={Phase.DATA_WAIT: 10 * MS}, low_ns=0.0, high_ns=11 * MS)
    assert shared.gain_of_fix(100 * MS).speedup == pytest.approx(1 / 0.9), "others took the rest"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (run(100, fault(40)), run(62, fault(10))),  # still there
        (run(100, fault(40)), run(62, num_rules=None)),  # nobody asked the second
        (run(100, fault(4)), run(96)),  # may have come and gone with the noise
        (run(100), run(62)),  # nothing was predicted
    ],
)
def test_nothing_is_noted_where_no_fault_is_known_to_be_gone(before: Profile, after: Profile) -> None:
    assert prediction(before, after, compared(100, 62)) is None


def test_runs_of_different_scripts_or_devices_try_no_fix() -> None:
    after = run(62)
    for change in ({"script": "other.py"}, {"device": "cuda"}, {"world_size": 2}):
        other = replace(after, run=replace(after.run, **change))  # type: ignore[arg-type]
        assert prediction(run(100, fault(40)), other, compared(100, 62)) is None


def test_a_prediction_that_was_wrong_is_outside_and_its_error_has_a_sign() -> None:
    wrong = replace(TRIED, measured=Gain(speedup=1.0, low=0.9, high=1.1))
    assert not wrong.is_inside
    assert wrong.error_share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        ((1.4, 1.2, 1.6), "1.4x (1.2 to 1.6)"),
        ((1.4, 1.39, 1.41), "1.40x (1.39 to 1.41)"),
        ((1.08, 1.0, 1.1), "1.08x (1.00 to 1.10)"),
        ((12.2, 9.6, 100), "12x (10 to 100)"),
    ],
)
def test_a_gain_is_written_with_the_digits_that_show_its_interval(
    gain: tuple[float, float, float], text: str
) -> None:
    assert format_gain(*gain) == text


# -- the ledger


def test_the_ledger_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIAGNOSE_STATE", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert ledger_path() == Path("/home/me/.local/state/diagnose/gains.jsonl")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert ledger_path() == Path("/state/diagnose/gains.jsonl")
    monkeypatch.setenv("DIAGNOSE_STATE", "/mine")
    assert ledger_path() == Path("/mine/gains.jsonl")


def test_a_pair_is_noted_once_and_read_back_as_it_was(state: Path) -> None:
    assert read_predictions() == []
    assert note_prediction(TRIED)
    assert not note_prediction(replace(TRIED, noted_unix=2.0))
    assert note_prediction(replace(TRIED, after="c"))
    assert read_predictions() == [TRIED, replace(TRIED, after="c")]


def test_a_torn_or_foreign_line_costs_only_itself(state: Path) -> None:
    note_prediction(TRIED)
    lines = ["{}", "[]", "null", '{"version": 99}', '{"version": 1, "rules": 3}', '{"version": 1, "ru']
    with ledger_path().open("a") as file:
        file.write("\n".join(lines))
    assert note_prediction(replace(TRIED, after="c"))
    assert [tried.after for tried in read_predictions()] == [TRIED.after, "c"]


def test_calibration_counts_errors_and_hits_per_fault() -> None:
    high = replace(TRIED, predicted=Gain(speedup=3.0, low=2.0, high=4.0), rules=("slow-updates",))
    assert_lines(
        calibration_text([TRIED, high], Terminal()),
        """
  Predicted beside measured speedup, of fixes that were tried. The error is the
  median, as a part of the measured speedup.
  faults that were gone  tried  error  in the interval  within noise
  all                        2   53 %           1 of 2        1 of 2
  serial-loading             1  6.7 %           1 of 1        1 of 1
  slow-updates               1  100 %           0 of 1        0 of 1
""",
    )
    noisy = replace(TRIED, measured=Gain(speedup=1.5, low=0.2, high=2.8))
    assert calibration_text([TRIED, noisy], Terminal()).endswith(
        "  1 measurement too noisy to count: 50 % of the speedup or more.\n"
    )
    assert calibration_text([], Terminal()).startswith("  No fix has been tried yet. ")


# -- compare


def test_compare_tells_what_became_of_each_finding_and_of_the_prediction() -> None:
    before, after = run(100, fault(40)), run(62, replace(fault(8), rule="new-one"))
    comparison = compared(100, 62)
    tried = prediction(before, after, comparison)
    faults = FaultChanges(before=before, after=after, prediction=tried)
    text = comparison_text(comparison, (before.run, after.run), Terminal(), faults)
    assert_lines(
        text[text.index("  Findings, by") : text.index("\n  One run of each")],
        """
  Findings, by what they cost per step.
  fault                 A        B  outcome
  serial-loading  40.0 ms        -  gone
  new-one               -  8.00 ms  new
  Without serial-loading, 1.7x (1.5 to 1.8) faster was predicted; measured: 1.6x
  (1.4 to 1.9).
""",
    )
    report = json.loads(json.dumps(comparison_json(comparison, (before.run, after.run), faults)))
    assert [finding["outcome"] for finding in report["findings"]] == ["gone", "new"]
    assert report["prediction"]["rules"] == ["serial-loading"]
    assert report["prediction"]["inside"] is True


def test_the_command_line_shows_the_calibration(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note_prediction(TRIED)
    monkeypatch.setattr(sys, "argv", ["diagnose", "rules", "--calibration", "--json", "-"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tried"], shown["inside"]) == (1, 1)
    assert shown["median_error"] == pytest.approx(0.1 / 1.5)
