"""A table of all steps, for spreadsheets, pandas and R."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diagnose.core.profile import RunInfo
from diagnose.export._files import replace
from diagnose.export._reading import Reading
from diagnose.export.base import Exporter, Write


class Csv(Exporter):
    """Writes the table that `diagnose.read_steps` returns: a line for each step of each rank. Compressed
    where the name ends in `.gz`."""

    target = "FILE"
    live = False

    def default_target(self, run: RunInfo) -> str:
        """Returns a file of the run's name."""
        return f"{run.id or 'run'}.csv"

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        """Writes the file at once when it is given a reading."""
        path = Path(target)

        def write(reading: Reading) -> str:
            from diagnose.analysis.table import read_steps

            with warnings.catch_warnings(record=True) as damage:
                warnings.simplefilter("always")
                table = read_steps(reading.folder)
            data = table.to_csv(index=False, float_format="%.6f").encode()
            replace(path, gzip.compress(data, 6) if path.suffix == ".gz" else data, "csv")
            notes = "".join(f"\n  {warning.message}" for warning in damage)
            return f"wrote {path}: {len(table):,} steps{notes}"

        yield write
