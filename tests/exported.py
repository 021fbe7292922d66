"""Runs to export, and what Prometheus and Chrome make of what was exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from diagnose.export._follower import Follower
from diagnose.export._reading import Reading
from tests.recorded import manifest, record


def read(folder: Path) -> Reading:
    return Follower(folder).look(is_last=True)


def recorded_run(folder: Path, num_steps: int = 60, **more: Any) -> Path:
    record(manifest(folder), num_steps, **more)
    return folder


Samples = dict[tuple[tuple[str, str], ...], float]


def parsed(text: str) -> dict[str, Samples]:
    """The series of a text file by metric, as Prometheus's own parser reads them."""
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in series, "a series that comes twice makes Prometheus refuse the file"
            series[key] = sample.value
    return found


def assert_chrome_trace(trace: Mapping[str, Any]) -> None:
    """Holds a trace to the Chrome Trace Event format, as far as it is used here."""
    json.dumps(trace, allow_nan=False)
    ends: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] in "MXCi"
        if event["ph"] == "M":
            assert event["args"].keys() <= {"name", "sort_index"}
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            track = (event["pid"], event["tid"])
            assert event["dur"] >= 0
            begin = round(1000 * event["ts"])  # nanoseconds: Perfetto drops what overlaps by one
            assert begin >= ends.get(track, 0), "slices of a track follow each other"
            ends[track] = begin + round(1000 * event["dur"])
        elif event["ph"] == "C":
            assert event["args"] and all(
                isinstance(value, (int, float)) for value in event["args"].values()
            )
        else:
            assert event["s"] == "t"
