"""The report as JSON: every published key, and of each finding what the text says."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace

import pytest

from diagnose.core.host import HostStats
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Throughput
from diagnose.report import Terminal, to_json, to_text
from tests.profiles import FAULTY, FOUR_RANKS, HEALTHY, NOTHING, PROFILE, TUNED


def test_json_report_has_every_published_key_and_shares_that_sum_to_one() -> None:
    report = json.loads(json.dumps(to_json(PROFILE), allow_nan=False))
    assert {key: sorted(value) for key, value in report.items() if isinstance(value, dict)} == {
        "run": sorted(
            [
                "argv",
                "device",
                "duration_s",
                "error",
                "exit_code",
                "id",
                "lost",
                "recorder",
                "script",
                "signal",
                "started",
                "torch",
                "world_size",
            ]
        ),
        "throughput": ["samples_per_s", "samples_per_s_ci95", "steps_per_s", "tokens_per_s"],
        "steps": ["count", "left_out", "mean_ms", "median_ms", "p95_ms", "p99_ms", "warmup"],
        "clock": ["device_share"],
        "overhead": ["startup_s", "us_per_step"],
        "input": sorted(field.name for field in fields(InputStats)),
        "host": sorted(field.name for field in fields(HostStats)),
        "events": ["checkpoint", "gc"],
    }
    assert (report["schema"], report["status"], report["confirmation"]) == (1, "ok", None)
    assert report["findings"] == report["abstained"] == report["trials"] == report["ranks"] == []
    names = [phase["name"] for phase in report["phases"]]
    assert names == [phase.value for phase in Phase if phase is not Phase.COMMUNICATION]
    assert abs(sum(phase["share"] for phase in report["phases"]) - 1) < 1e-6
    assert report["phases"][0] == {"name": "data_wait", "ms_per_step": 20.5, "share": 0.5}
    assert report["where"][1] == {
        "phase": "backward",
        "file": os.path.join(os.getcwd(), "train.py"),
        "line": 118,
        "function": "main",
        "share": 0.25,
        "num_samples": 300,
        "in_worker": False,
        "text": "loss.backward()",
        "via": "",
    }


def test_a_tuned_run_has_its_figures_from_before_and_after() -> None:
    after = json.loads(json.dumps(to_json(TUNED)))["tuning"]["after"]
    assert (after["median_ms"], after["samples_per_s"]) == (19.6, 1610.0)
    assert [phase["name"] for phase in after["phases"]] == ["forward", "backward", "other"]
    text = to_text(TUNED, Terminal(width=120))
    assert "95 % interval 770-781, before tuning; after it 1,610" in text
    assert "tuned to" in text and "2.0x" in text
    assert "Tuning has put loader-workers=8 in force. By hand: Give the DataLoader two workers." in text
    assert "before tuning" not in to_text(FAULTY, Terminal(width=120))


def test_json_report_says_of_each_finding_what_the_text_says() -> None:
    report = json.loads(json.dumps(to_json(FAULTY), allow_nan=False))
    first, second = report["findings"]
    gain = pytest.approx({"speedup": 41 / 21, "low": 41 / 27, "high": 41 / 20.5})
    assert (first.pop("gain"), first.pop("gains")) == (gain, {"loader-workers": gain})
    assert first.pop("gain_of_fix") == gain
    assert first == {
        "rule": "serial-loading",
        "summary": "The training thread loads its own batches: 50 % of each step.",
        "lost_ms_per_step": 20.0,
        "phases": {"data_wait": 20.0, "gc": 0.0},
        "assumption": "workers prepare a batch while the model computes, on CPUs that are free",
        "evidence": [
            "num_workers=0, and 20.5 ms of each step pass in next(loader).",
            "4 CPUs are idle.",
        ],
        "fix": "Give the DataLoader two workers.",
        "code": "DataLoader(..., num_workers=2, persistent_workers=True)",
        "file": os.path.join(os.getcwd(), "train.py"),
        "line": 31,
        "ranks": [],
        "actions": ["loader-workers"],
        "in_force": [],
    }
    assert (second["file"], second["line"], second["ranks"]) == ("", 0, [0, 3])
    assert report["num_rules"] == 12
    assert [finding["in_force"] for finding in to_json(TUNED)["findings"]] == [["loader-workers=8"], []]
    assert to_json(HEALTHY)["abstained"] == [{"rule": "starved-of-cpu", "missing": "host.runnable_share"}]


def test_json_report_of_nothing_measured_keeps_its_keys_and_invents_no_zero() -> None:
    report = to_json(NOTHING)
    assert report.keys() == to_json(PROFILE).keys()
    assert report["phases"] == report["where"] == []
    assert report["throughput"]["samples_per_s"] is None
    assert report["steps"]["median_ms"] is None


def test_json_report_has_no_number_that_json_lacks() -> None:
    odd = replace(
        PROFILE,
        throughput=Throughput(samples_per_s=float("inf"), samples_per_s_ci95=(float("nan"), 2.0)),
        phase_time_ns={Phase.FORWARD: 5.0},
    )
    report = to_json(odd)
    json.dumps(report, allow_nan=False)
    assert report["throughput"]["samples_per_s_ci95"] == [None, 2.0]
    assert [phase["name"] for phase in report["phases"]] == ["forward", "other"]


def test_json_report_gives_each_rank_its_phases() -> None:
    rank = to_json(replace(PROFILE, ranks=FOUR_RANKS))["ranks"][3]
    assert (rank["rank"], rank["host"], rank["late_ms_per_step"]) == (3, "node1", 1.5)
    assert [phase["name"] for phase in rank["phases"]] == ["forward", "communication", "gc", "other"]
