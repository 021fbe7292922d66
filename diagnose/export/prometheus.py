"""A text file for the node exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diagnose.export._files import FileExporter, replace
from diagnose.export._metrics import Metric, metrics_of
from diagnose.export._reading import Reading, clean

UNITS = {"s": "seconds", "By": "bytes", "1": "ratio"}
"""UCUM's codes as Prometheus has them spelled; a unit in braces says what is counted and is left out."""


class Prometheus(FileExporter):
    """Writes all metrics to one file, replaced as a whole: who scrapes it never sees half of it.

    Names follow OpenTelemetry's rules for Prometheus: dots become underscores, the unit is appended in
    full, and then `_total` to what only grows. Every series bears the name of the run.
    """

    ending = ".prom"  # the collector reads these alone

    def write(self, path: Path, reading: Reading) -> str:
        text = to_text(metrics_of(reading), clean(reading.profile.run.id))
        replace(path, text.encode(), "prometheus")
        return f"wrote {path}"


def to_text(metrics: list[Metric], run: str) -> str:
    """Returns the metrics in Prometheus's text format, version 0.0.4."""
    lines = []
    for metric in metrics:
        name = _name(metric)
        lines.append(f"# HELP {name} {_escaped(metric.help)}")
        lines.append(f"# TYPE {name} {'counter' if metric.is_counter else 'gauge'}")
        lines += [f"{name}{_labels({'run': run, **labels})} {value!r}" for labels, value in metric.values]
    return "\n".join(lines) + "\n"


def _name(metric: Metric) -> str:
    name = metric.name.replace(".", "_")
    unit = "per_second" if metric.unit.endswith("/s") else UNITS.get(metric.unit, "")
    if metric.name == "diagnose.run":
        unit = "info"
    total = "total" if metric.is_counter else ""
    return "_".join(filter(None, (name, unit, total)))


def _labels(labels: Mapping[str, str]) -> str:
    quoted = (f'{key}="{_escaped(text, quotes=True)}"' for key, text in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
