"""Files that others read while they are written anew."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from diagnose.core.errors import DiagnoseError


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
