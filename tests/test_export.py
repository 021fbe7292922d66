"""What each exporter writes, read back with the library that it is written for."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import export as otel_export
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    InMemoryMetricReader,
    MetricExportResult,
    PeriodicExportingMetricReader,
)
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diagnose.core.errors import DiagnoseError
from diagnose.core.phases import Phase
from diagnose.core.trial import Measured, Outcome, Safety, Trial, Tuning
from diagnose.export import _trace, otel
from diagnose.export._live import export_once
from diagnose.export._metrics import Metric, metrics_of
from diagnose.export._reading import Reading
from diagnose.export.base import Destination, exporter_names
from diagnose.export.perfetto import Perfetto, trace_of
from diagnose.export.prometheus import to_text
from tests.exported import assert_chrome_trace, parsed, read, recorded_run
from tests.recorded import BATCH, MS, manifest, record, steps, writer
from tests.running import DIAGNOSE, run, write

HOSTILE = 'a "b"\\c\n<script>\u202e\udcff é 日本'
GC = (5 * MS, 0, "gc", {"collected": float("nan")})
KEPT = {
    "action": "gc-freeze",
    "outcome": "kept",
    "step": 3,
    "reason": HOSTILE,
    "measured": {"speedup": 1.2},
}

ANCHOR_NS = [0, 1_700_000_000 * 10**9]

OFFLINE = ("csv", "perfetto", "prometheus", "tensorboard")
"""Exporters that write files with what is installed for the tests."""


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    events = (GC, (40 * MS, 1, "checkpoint", {}), (90 * MS, 2, "trial", KEPT))
    folder = recorded_run(tmp_path / "run", events=events, anchor_ns=ANCHOR_NS)
    slow = {"forward": 20.0, "gap_after_rest": 18.0}
    record(folder, 60, rank=1, slots_ms=slow, anchor_ns=ANCHOR_NS)
    return folder


@pytest.fixture(params=["no ranks", "one step", "torn", "empty file", "crashed", "hostile"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Runs that something has gone wrong with, or hardly begun."""
    kind = request.param
    name = 'caf\udce9 日本 "x" \\' if kind == "hostile" else "odd"
    try:
        folder = manifest(tmp_path / name, exit_code=1 if kind == "crashed" else 0)
    except UnicodeEncodeError:
        folder = manifest(tmp_path / "hostile", id=HOSTILE)
    if kind == "one step":
        record(folder, 1)
    elif kind == "crashed":
        record(folder, 7, error="RuntimeError")
    elif kind == "hostile":
        manifest(folder, id=HOSTILE, script=f"/{HOSTILE}", argv=[HOSTILE])
        record(
            folder,
            30,
            host=HOSTILE,
            torch=HOSTILE,
            device=HOSTILE,
            events=[(9, 0, "trial", {HOSTILE: HOSTILE})],
        )
    elif kind == "torn":
        record(folder, 2000)
        path = folder / "rank0.sqlite"
        path.write_bytes(path.read_bytes()[:20_000])
    elif kind == "empty file":
        (folder / "rank0.sqlite").write_bytes(b"")
    return folder


# -- every exporter


def test_every_exporter_is_named_in_the_help(tmp_path):
    asked = run(*DIAGNOSE[:-1], "export", "--help", cwd=tmp_path)
    assert asked.code == 0
    assert all(name in asked.stdout for name in exporter_names())


@pytest.mark.parametrize("name", exporter_names())
def test_an_exporter_takes_a_run_to_where_it_was_told(name, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    destination = Destination(name=name)
    for module in _requirements(name):
        pytest.importorskip(module)
    export_once(finished, [destination])
    assert f"\n{name}: " in "\n" + capsys.readouterr().err


def _requirements(name: str) -> list[str]:
    module = importlib.import_module(f"diagnose.export.{name}")
    return list(next(vars(module)[key] for key in vars(module) if key.lower() == name).requires)


@pytest.mark.parametrize("name", OFFLINE)
def test_a_run_that_is_odd_is_exported_as_far_as_it_goes(name, odd, tmp_path):
    target = tmp_path / "out.json"
    export_once(odd, [Destination(name=name, target=str(target))])
    assert target.exists()
    if name == "prometheus":
        assert parsed(target.read_text(encoding="utf-8"))["diagnose_run_active"]
    elif name == "perfetto":
        assert_chrome_trace(json.loads(target.read_text(encoding="utf-8")))


def test_an_odd_run_is_sent_by_opentelemetry_too(odd):
    assert "diagnose.run" in sent(read(odd))


def test_what_is_unknown_or_not_installed_is_said_with_what_to_do(monkeypatch):
    with pytest.raises(DiagnoseError, match=r"^export: there is no 'grafana' to export to. There are: csv"):
        Destination.parse("grafana=x")
    with pytest.raises(DiagnoseError, match="names no target"):
        Destination.parse("perfetto=")
    monkeypatch.setattr("diagnose.export.tensorboard.Tensorboard.requires", {"no_such.module": "no-such"})
    with pytest.raises(DiagnoseError) as refused:
        Destination(name="tensorboard").exporter()
    assert str(refused.value) == (
        "export to tensorboard: no-such is not installed in this Python.\nInstall it: pip install no-such"
    )


# -- Prometheus


def test_prometheus_reads_what_was_recorded(finished):
    text = to_text(metrics_of(read(finished)), "run")
    series = parsed(text)
    steps_of = {dict(key)["rank"]: value for key, value in series["diagnose_steps_total"].items()}
    assert steps_of == {"0": 60, "1": 60}
    assert sum(series["diagnose_samples_total"].values()) == 2 * 60 * BATCH
    spent = series["diagnose_phase_time_seconds_total"]
    recorded = steps(0, 60)
    assert sum(value for key, value in spent.items() if dict(key)["rank"] == "0") == pytest.approx(
        sum(sum(row[5:]) for row in recorded) / 1e9
    )
    assert {dict(key)["phase"] for key in spent} == {phase.value for phase in Phase}
    assert {dict(key)["kind"]: value for key, value in series["diagnose_events_total"].items()} == {
        "gc": 1,
        "checkpoint": 1,
    }
    assert all(value == 1 << 30 for value in series["diagnose_process_memory_bytes"].values())
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge")


@pytest.mark.parametrize("text", ["", '"', "\\", "\\n", "\n", '\\"', "}", "a=b,c", "\x00\t", "日本\u202e"])
def test_any_text_survives_as_a_label(text):
    metric = Metric(name="x", unit="", help=text, values=(({"key": text}, 1.5),))
    [family] = text_string_to_metric_families(to_text([metric], text))
    assert family.samples[0].labels == {"run": text, "key": text}


def test_a_metrics_file_is_replaced_as_a_whole_and_open_to_the_collector(finished, tmp_path):
    target = tmp_path / "metrics" / "run.prom"
    target.parent.mkdir()
    target.write_text("before")
    held = target.open()
    export_once(finished, [Destination(name="prometheus", target=str(target))])
    assert held.read() == "before", "who had it open reads the old one to its end"
    assert os.listdir(target.parent) == ["run.prom"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_target_that_cannot_be_written_is_found_before_the_script_runs(tmp_path):
    script = write(tmp_path / "train.py", "print('ran')")
    ended = run(*DIAGNOSE, "--export", "prometheus=gone/run.prom", script, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("export to prometheus: cannot write gone/run.prom: ")


# -- Perfetto


def slices(trace: Mapping[str, Any], pid: int, tid: int) -> list[dict[str, Any]]:
    return [
        each
        for each in trace["traceEvents"]
        if each["ph"] == "X" and (each["pid"], each["tid"]) == (pid, tid)
    ]


def test_a_trace_holds_each_step_with_its_phases_below_it(finished):
    trace = trace_of(read(finished))
    assert_chrome_trace(trace)
    for pid in (1, 2):
        drawn, phases = slices(trace, pid, 1), slices(trace, pid, 2)
        assert [each["name"] for each in drawn] == [f"step {number}" for number in range(60)]
        assert sum(each["dur"] for each in phases) == pytest.approx(sum(each["dur"] for each in drawn))
    first = steps(0, 60)[0]
    assert slices(trace, 1, 1)[0]["dur"] == pytest.approx(sum(first[5:]) / 1000, abs=0.01)
    happened = [each["name"] for each in trace["traceEvents"] if each["ph"] == "i"]
    assert {"gc", "checkpoint", "trial: gc-freeze kept"} <= set(happened)
    assert {"throughput", "resident memory"} <= {
        each["name"] for each in trace["traceEvents"] if each["ph"] == "C"
    }


def test_ranks_whose_hosts_disagree_on_the_time_are_drawn_by_the_first_ranks_clock(tmp_path):
    folder, rows = manifest(tmp_path / "run"), steps(0, 60, spread=0)
    for rank, ahead_ns in enumerate((0, 7_000 * MS)):
        anchor_ns = [0, ANCHOR_NS[1] + rank * 5_000 * MS]
        file = writer(folder, rank, host=f"node{rank}", anchor_ns=anchor_ns)
        times = [round(end_ns * (1 + rank * 50e-6)) + ahead_ns for end_ns, *_ in rows]
        file.add_steps([(now, *row[1:]) for now, row in zip(times, rows, strict=True)])
        file.add_meetings([(now - MS, now) for now in times])
        file.close()
    trace = trace_of(read(folder))
    assert_chrome_trace(trace)
    ends_us = [[each["ts"] + each["dur"] for each in slices(trace, pid, 1)] for pid in (1, 2)]
    assert ends_us[1] == pytest.approx(ends_us[0], abs=1)


def test_a_long_run_makes_a_trace_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(_trace, "MAX_STEPS", 100)
    monkeypatch.setattr(_trace, "MAX_BINS", 50)
    folder = recorded_run(tmp_path / "run", 3000)
    trace = trace_of(read(folder))
    assert_chrome_trace(trace)
    drawn = slices(trace, 1, 1)
    assert len(drawn) <= 151
    assert drawn[0]["name"] == "steps 0 to 57" and drawn[-1]["name"] == "step 2999"
    recorded_ns = sum(sum(row[5:]) for first in range(0, 3000, 500) for row in steps(first, 500))
    assert sum(each["dur"] for each in drawn) == pytest.approx(recorded_ns / 1000)


def test_a_trace_is_compressed_where_its_name_says_so(finished, tmp_path):
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    export_once(finished, [Destination(name="perfetto", target=str(path)) for path in (plain, packed)])
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(plain.read_bytes())


def test_a_full_disk_leaves_the_trace_that_was_there(finished, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("before")
    reading = read(finished)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with (
            pytest.raises(DiagnoseError, match="File too large"),
            Perfetto().open(str(path), reading.profile.run) as put,
        ):
            put(reading)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "before"
    assert not list(tmp_path.glob(".trace*"))


# -- OpenTelemetry


def sent(reading: Reading) -> dict[str, list[Any]]:
    """The points of each metric as the SDK collects them."""
    reader = InMemoryMetricReader()
    with otel.sending(reader, reading.profile.run, []) as write:
        write(reading)
        data = reader.get_metrics_data()
    assert data is not None
    [resource] = data.resource_metrics
    assert resource.resource.attributes["service.name"] == "diagnose"
    [scope] = resource.scope_metrics
    return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


def test_opentelemetry_collects_what_was_recorded(finished):
    points = sent(read(finished))
    assert [(point.attributes["diagnose.rank"], point.value) for point in points["diagnose.steps"]] == [
        ("0", 60),
        ("1", 60),
    ]
    assert points["diagnose.phase.time"][0].attributes["host.name"] == "somewhere"
    assert points["diagnose.run"][0].value == 1


def test_the_series_of_a_large_job_stay_apart(finished, capsys, monkeypatch):
    reading = read(finished)
    ranks = tuple(replace(reading.ranks[0], name=str(number)) for number in range(400))
    [wanted] = [m for m in metrics_of(replace(reading, ranks=ranks)) if m.name == "diagnose.phase.time"]
    assert len(wanted.values) > 2000
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    with otel.sending(otel._reader("", []), reading.profile.run, []) as write:
        write(replace(reading, ranks=ranks))
        sent = capsys.readouterr().err
    [scope] = json.loads(sent)["resource_metrics"][0]["scope_metrics"]
    [points] = [each["data"]["data_points"] for each in scope["metrics"] if each["name"] == wanted.name]
    assert len(points) == len(wanted.values)


def test_an_sdk_that_has_no_limits_to_set_is_asked_for_none(monkeypatch):
    class Older(PeriodicExportingMetricReader):
        def __init__(self, exporter: Any, export_interval_millis: float | None = None) -> None:
            super().__init__(exporter, export_interval_millis)

    monkeypatch.setattr(otel_export, "PeriodicExportingMetricReader", Older)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    assert isinstance(otel._reader("", []), Older)


def test_what_tuning_kept_is_a_metric_until_it_is_undone(finished):
    reading = read(finished)
    confirmed = Measured(
        speedup=1.5, low=1.2, high=1.8, pairs=9, detectable=1.1, without_ns=6e7, with_ns=4e7
    )
    kept = Trial(action="gc-freeze", safety=Safety.EXACT, outcome=Outcome.KEPT, reason="")

    def gains(**more: Any) -> list[float]:
        tuning = Tuning(trials=(kept,), confirmation=confirmed, **more)
        found = metrics_of(replace(reading, profile=replace(reading.profile, tuning=tuning)))
        return [value for each in found if each.name == "diagnose.tuning.gain" for _, value in each.values]

    assert gains() == [1.5] and gains(undone="the loss went wrong") == []


def test_a_collector_that_refuses_is_told_of(finished):
    class Refusing(ConsoleMetricExporter):
        def export(self, *arguments: Any, **options: Any) -> MetricExportResult:
            return MetricExportResult.FAILURE

    reading, failed = read(finished), []
    exporter = otel._told(otel_export, Refusing(), failed)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=otel.NEVER_MS)
    with otel.sending(reader, reading.profile.run, failed) as write:
        for _ in range(2):
            with pytest.raises(DiagnoseError, match="the collector did not take the metrics"):
                write(reading)


# -- TensorBoard


def test_tensorboard_shows_every_step_and_the_report(finished, tmp_path):
    export_once(finished, [Destination(name="tensorboard", target=str(tmp_path / "tb"))])
    board = EventAccumulator(str(tmp_path / "tb"), size_guidance={"tensors": 0})
    board.Reload()
    tags = board.Tags()["tensors"]
    steps_ms = board.Tensors("diagnose/step_ms")
    assert [each.step for each in steps_ms] == list(range(60))
    assert steps_ms[0].wall_time == pytest.approx(1_700_000_000, abs=10)
    first = steps(0, 60)[0]
    assert steps_ms[0].tensor_proto.float_val[0] == pytest.approx(sum(first[5:]) / 1e6, rel=1e-5)
    assert "diagnose/report" in tags and "diagnose/phase_ms/forward" in tags
    report = board.Tensors("diagnose/report")[0].tensor_proto.string_val[0].decode()
    assert "train.py" in report
