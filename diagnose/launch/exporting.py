"""What exports a run while it goes on: a process of its own, beside the one that waits for the script."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diagnose.launch.beside import end_beside, start_beside

LOG_FILE = "export.log"

ENDS_WITHIN_S = 60.0
"""Longer than this the end of a run does not wait for its last export."""

MAX_LOG_BYTES = 1_000_000


@dataclass(slots=True, kw_only=True)
class Exporting:
    """A process that exports.

    Attributes:
        process: It makes its last export when it is to end.
        log: Where it writes what it says.
        names: The exporters it writes with.
    """

    process: subprocess.Popen[bytes]
    log: Path
    names: tuple[str, ...]

    def finish(self, *, quiet: bool) -> list[str]:
        """Has the last export made, and returns what it has to say of all of them, a line each.

        Args:
            quiet: Only what failed.
        """
        code = end_beside(self.process, ENDS_WITHIN_S)
        if code is None:
            return [*self._said(quiet), f"export: it took too long and was ended; see {self.log}"]
        return [*self._said(quiet), *([] if code == 0 else [f"export: failed; see {self.log}"])]

    def _said(self, quiet: bool) -> list[str]:
        try:
            with self.log.open("rb") as file:
                lines = file.read(MAX_LOG_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        # Libraries and tracebacks speak there too.
        begins = tuple(f"{name}: " for name in ("export", *(() if quiet else self.names)))
        return list(dict.fromkeys(line for line in lines if line.startswith(begins)))


def check_exports(exports: Sequence[str]) -> None:
    """Finds now, not after hours of training, an exporter that is not there, or cannot write.

    Raises:
        DiagnoseError: If there is one.
    """
    if exports:
        from diagnose.export.base import Destination

        for text in exports:
            Destination.parse(text).check()


def start_exporting(folder: Path, exports: Sequence[str]) -> Exporting:
    """Starts the process that exports a run.

    Args:
        folder: The run's folder, absolute.
        exports: `NAME` or `NAME=TARGET` each.

    Raises:
        OSError: If it cannot be started, or the folder takes no file.
    """
    log = folder / LOG_FILE
    destinations = [part for text in exports for part in ("--to", text)]
    process = start_beside(["export", str(folder), "--beside", *destinations], log)
    return Exporting(process=process, log=log, names=tuple(text.partition("=")[0] for text in exports))
