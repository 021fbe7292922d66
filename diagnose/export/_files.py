"""Exporters that write one file, which others may read while it is written anew."""

from __future__ import annotations

import contextlib
import gzip
import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import RunInfo
from diagnose.export._reading import Reading
from diagnose.export.base import Exporter, Write


class FileExporter(Exporter):
    """Writes a file anew with every reading; nothing is kept open.

    Attributes:
        ending: Of the file, where the user names none.
    """

    target = "FILE"
    ending: ClassVar[str]

    def default_target(self, run: RunInfo) -> str:
        """Returns a file of the run's name."""
        return f"{run.id or 'run'}{self.ending}"

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        """Writes nothing before it is given a reading."""
        yield lambda reading: self.write(Path(target), reading)

    @abstractmethod
    def write(self, path: Path, reading: Reading) -> str:
        """Writes the file, and says so in a few words."""


def packed(path: Path, data: bytes) -> bytes:
    """Compresses what goes into a file whose name ends in `.gz`."""
    return gzip.compress(data, 6) if path.suffix == ".gz" else data


def replace(path: Path, data: bytes, exporter: str) -> None:
    """Writes a file as a whole or not at all: a full disk or `kill -9` leaves what was there before.

    Raises:
        DiagnoseError: If it cannot be written.
    """
    # Not a name that a collector reads, and in the same folder: only there is a rename one step.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            path.write_bytes(data)
            return
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise DiagnoseError(f"export to {exporter}: cannot write {path}: {error.strerror}.") from error
