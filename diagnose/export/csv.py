"""A table of all steps, for spreadsheets, pandas and R."""

from __future__ import annotations

import warnings
from pathlib import Path

from diagnose.export._files import FileExporter, packed, replace
from diagnose.export._reading import Reading


class Csv(FileExporter):
    """Writes the table that `diagnose.read_steps` returns: a line for each step of each rank. Compressed
    where the name ends in `.gz`."""

    ending = ".csv"
    live = False

    def write(self, path: Path, reading: Reading) -> str:
        from diagnose.analysis.table import read_steps

        with warnings.catch_warnings(record=True) as damage:
            warnings.simplefilter("always")
            table = read_steps(reading.folder)
        data = table.to_csv(index=False, float_format="%.6f").encode()
        replace(path, packed(path, data), "csv")
        notes = "".join(f"\n  {warning.message}" for warning in damage)
        return f"wrote {path}: {len(table):,} steps{notes}"
