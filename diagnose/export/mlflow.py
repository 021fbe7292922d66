"""A run in MLflow, in the store that its own variables name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import RunInfo
from diagnose.export._reading import Reading, clean
from diagnose.export._scalars import about, report_of, scalars_of, summary_of
from diagnose.export.base import Exporter, Write, imported

INSTALL = "mlflow"

MAX_BATCH = 1000
"""Metrics that MLflow takes at once."""


class Mlflow(Exporter):
    """Logs scalars by step; at the end figures of the whole run, and the report as two artifacts.

    Where to: `MLFLOW_TRACKING_URI`, as for every client of MLflow. A run that goes on is `RUNNING` there,
    one whose script failed `FAILED`.
    """

    target = "EXPERIMENT"
    requires = {"mlflow": INSTALL}  # noqa: RUF012 (a constant; the base class has its type)

    def default_target(self, run: RunInfo) -> str:
        """Returns an experiment."""
        return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "diagnose"

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        """Begins a run of the same name."""
        mlflow = imported("mlflow", "mlflow", INSTALL)
        metric_of = imported("mlflow.entities", "mlflow", INSTALL).Metric
        try:
            client = mlflow.MlflowClient()
            experiment = client.get_experiment_by_name(target)
            number = experiment.experiment_id if experiment else client.create_experiment(target)
            begun = client.create_run(number, run_name=clean(run.id)).info.run_id
        except mlflow.exceptions.MlflowException as error:
            raise DiagnoseError(f"export to mlflow: {error.message}") from error

        def log(metrics: list[Any]) -> None:
            for first in range(0, len(metrics), MAX_BATCH):
                client.log_batch(begun, metrics=metrics[first : first + MAX_BATCH])

        ended = "FINISHED"

        def write(reading: Reading) -> str:
            nonlocal ended
            log(
                [
                    metric_of(name, value, int(1000 * point.unix), point.step)
                    for point in reading.points
                    for name, value in scalars_of(point).items()
                ]
            )
            for key, text in about(reading).items():
                client.set_tag(begun, key, text)
            if reading.is_last:
                ended = "FAILED" if reading.has_failed else "FINISHED"
                step, unix = reading.end
                at_ms = int(1000 * unix)
                log([metric_of(name, value, at_ms, step) for name, value in summary_of(reading).items()])
                from diagnose.report import to_json

                client.log_text(begun, report_of(reading), "diagnose/report.md")
                client.log_dict(begun, to_json(reading.profile), "diagnose/report.json")
            return f"logged run {begun} of experiment {target!r} to {mlflow.get_tracking_uri()}"

        status = "FAILED"
        try:
            yield write
            status = ended
        finally:
            client.set_terminated(begun, status)
