"""OpenTelemetry metrics, sent by the SDK."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from diagnose import __version__
from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import RunInfo
from diagnose.export._metrics import NAMES, Metric, metrics_of
from diagnose.export._reading import Reading, clean
from diagnose.export.base import Exporter, Write, imported

SDK = "opentelemetry-sdk"
OTLP = {
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http"),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc", "opentelemetry-exporter-otlp-proto-grpc"),
}
"""By the names that `OTEL_EXPORTER_OTLP_PROTOCOL` has for them."""

SEND_WITHIN_MS = 10_000
NEVER_MS = float("inf")
"""The SDK sends when it is told that there is a new reading, not by a clock of its own."""

MAX_SERIES = 1_000_000
"""Of one metric. The SDK merges all beyond its usual 2,000, which are the phases of 181 ranks."""

CONVENTIONS = {"host": "host.name", "script": "process.command"}
"""Attributes that OpenTelemetry's own conventions have names for; ours get a prefix."""


class Otel(Exporter):
    """Sends all metrics with every reading, over OTLP unless `OTEL_METRICS_EXPORTER` says `console`.

    Where to, with which headers and certificates, the standard `OTEL_` variables say; `--to otel=URL` takes
    the place of `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`. The run is the resource: `service.name` is
    `diagnose` unless `OTEL_SERVICE_NAME` says otherwise, `service.instance.id` the name of the run.
    """

    target = "URL"

    def __init__(self) -> None:
        self.requires = {"opentelemetry.sdk": SDK}
        if _wanted() == "otlp":
            self.requires |= dict([OTLP[_protocol()]])

    def default_target(self, run: RunInfo) -> str:
        """Returns nothing: the environment knows."""
        return ""

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        """Sets the SDK up, apart from whatever the process itself may send."""
        failed: list[str] = []
        with sending(_reader(target, failed), run, failed) as write:
            yield write


@contextmanager
def sending(reader: Any, run: RunInfo, failed: list[str]) -> Iterator[Write]:
    """Gives readings to one reader of the SDK.

    Args:
        reader: An `opentelemetry.sdk.metrics.export.MetricReader`.
        run: What runs.
        failed: Where the reader's exporter leaves what went wrong.
    """
    metrics = imported("opentelemetry.sdk.metrics", "otel", SDK)
    resources = imported("opentelemetry.sdk.resources", "otel", SDK)
    api = imported("opentelemetry.metrics", "otel", SDK)
    about = {"service.instance.id": clean(run.id)}
    if "OTEL_SERVICE_NAME" not in os.environ:
        about["service.name"] = "diagnose"
    provider = metrics.MeterProvider([reader], resource=resources.Resource.create(about))
    meter = provider.get_meter("diagnose", __version__)
    latest: dict[str, Metric] = {}

    def reported(name: str) -> Callable[[Any], Iterable[Any]]:
        def observe(options: Any) -> Iterable[Any]:
            metric = latest.get(name)
            for labels, value in metric.values if metric is not None else ():
                yield api.Observation(value, {_attribute(key): text for key, text in labels.items()})

        return observe

    for name, (unit, help, is_counter) in NAMES.items():
        make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        make(name, [reported(name)], unit=unit, description=help)

    def write(reading: Reading) -> str:
        latest.clear()
        latest.update((metric.name, metric) for metric in metrics_of(reading))
        failed.clear()
        if not provider.force_flush(SEND_WITHIN_MS):
            failed.append("the metrics could not be sent in time")
        if failed:
            raise DiagnoseError(f"export to otel: {failed[0]}.")
        return "sent metrics by OpenTelemetry"

    try:
        yield write
    finally:
        provider.shutdown(SEND_WITHIN_MS)


def _attribute(key: str) -> str:
    return CONVENTIONS.get(key, f"diagnose.{key}")


def _reader(target: str, failed: list[str]) -> Any:
    export = imported("opentelemetry.sdk.metrics.export", "otel", SDK)
    if _wanted() == "console":
        # stdout may be a pipe into another program, or the script's.
        exporter = export.ConsoleMetricExporter(out=sys.stderr)
    else:
        exporter = _told(export, _otlp(target), failed)
    return _unmerged(export.PeriodicExportingMetricReader, exporter, export_interval_millis=NEVER_MS)


def _unmerged(reader: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Makes a reader that keeps every series of a large job apart, where the SDK would merge them."""
    metrics = imported("opentelemetry.sdk.metrics", "otel", SDK)
    limits = dict.fromkeys((metrics.ObservableCounter, metrics.ObservableGauge), MAX_SERIES)
    try:
        return reader(*arguments, **options, cardinality_limits=limits)
    except TypeError:  # an SDK of before there was a limit to set
        return reader(*arguments, **options)


def _wanted() -> str:
    """Returns `otlp` or `console`."""
    wanted = os.environ.get("OTEL_METRICS_EXPORTER", "otlp").strip() or "otlp"
    if wanted not in ("otlp", "console"):
        raise DiagnoseError(
            f"export to otel: OTEL_METRICS_EXPORTER is {wanted!r}; this writes by 'otlp' or to 'console'."
        )
    return wanted


def _protocol() -> str:
    """Returns a key of `OTLP`."""
    default = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", default)
    if protocol not in OTLP:
        raise DiagnoseError(
            f"export to otel: there is no protocol {protocol!r} (OTEL_EXPORTER_OTLP_PROTOCOL). "
            f"There are: {', '.join(OTLP)}."
        )
    return protocol


def _otlp(target: str) -> Any:
    module, install = OTLP[_protocol()]
    exporter = imported(f"{module}.metric_exporter", "otel", install).OTLPMetricExporter
    return exporter(endpoint=target) if target else exporter()


def _told(export: Any, exporter: Any, failed: list[str]) -> Any:
    """Makes an exporter tell where it fails: the SDK would only log that, and go on."""
    inner = exporter.export

    def sent(*arguments: Any, **options: Any) -> Any:
        result = inner(*arguments, **options)
        if result is not export.MetricExportResult.SUCCESS:
            failed.append("the collector did not take the metrics")
        return result

    exporter.export = sent
    return exporter
