"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import RunInfo
from diagnose.export._reading import Reading
from diagnose.export._scalars import report_of, scalars_of, summary_of
from diagnose.export.base import Exporter, Write, imported

INSTALL = "tensorboard"


class Tensorboard(Exporter):
    """Writes scalars by step, and the report as text, with TensorBoard's own writer: no torch is loaded.

    Each export of the same run to the same folder adds an event file; TensorBoard then shows the newest
    value of a step.
    """

    target = "FOLDER"
    requires = {"tensorboard": INSTALL}  # noqa: RUF012 (a constant; the base class has its type)

    def default_target(self, run: RunInfo) -> str:
        """Returns a folder beside those that torch's `SummaryWriter` makes."""
        return str(Path("runs") / f"diagnose-{run.id}")

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        """Adds an event file to the folder."""
        writers = imported("tensorboard.summary.writer.event_file_writer", "tensorboard", INSTALL)
        events = imported("tensorboard.compat.proto.event_pb2", "tensorboard", INSTALL)
        scalars = imported("tensorboard.plugins.scalar.summary_v2", "tensorboard", INSTALL)
        texts = imported("tensorboard.plugins.text.summary_v2", "tensorboard", INSTALL)
        try:
            writer = writers.EventFileWriter(target)
        except OSError as error:
            raise DiagnoseError(
                f"export to tensorboard: cannot write to {target}: {error.strerror}."
            ) from error

        def write(reading: Reading) -> str:
            for point in reading.points:
                for tag, value in scalars_of(point).items():
                    summary = scalars.scalar_pb(tag, value)
                    writer.add_event(events.Event(wall_time=point.unix, step=point.step, summary=summary))
            if reading.is_last:
                step, unix = reading.end
                summaries = [scalars.scalar_pb(tag, value) for tag, value in summary_of(reading).items()]
                for summary in (*summaries, texts.text_pb("diagnose/report", report_of(reading))):
                    writer.add_event(events.Event(wall_time=unix, step=step, summary=summary))
            writer.flush()
            return f"wrote {target}: tensorboard --logdir {target}"

        try:
            yield write
        finally:
            writer.close()
