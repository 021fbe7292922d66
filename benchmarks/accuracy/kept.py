"""Answers kept in a file, a line of JSON each: all cells take hours, so they are asked in several sittings.

Each line says at which commit of `diagnose` it was asked: delete those that the code would answer otherwise
by now.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accuracy.server import ROOT, job_of
from accuracy.truth import Answer, Cell, Said


class Kept:
    """What was answered so far.

    Args:
        path: The file; `None` keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._commit = commit()
        self._known: dict[str, dict[str, Any]] = {}
        for line in lines:
            with contextlib.suppress(ValueError):  # empty, or cut off when the benchmark was killed
                entry = json.loads(line)
                self._known[entry.pop("of")] = entry

    def answer(self, cell: Cell) -> Answer | None:
        """Returns the answer to a cell, if there is one."""
        known = self._known.get(_key(cell))
        if known is None:
            return None
        options = tuple(known["options"])
        job, *more = (job_of(dict(each)) for each in (known["job"], *known.get("more", ())))
        return Answer(
            cell=cell,
            job=job,
            more=tuple(more),
            options=options,
            true_share=known["true_share"],
            noise_share=known["noise_share"],
            commit=known.get("commit", ""),
        )

    def keep(self, answer: Answer) -> None:
        """Keeps an answer; not that a job has failed."""
        if answer.job is not None:
            entry = asdict(answer)
            del entry["cell"], entry["failed"]
            self._write(_key(answer.cell), entry)

    def said(self, tool: str, cell: Cell) -> Said | None:
        """Returns what another tool said of a cell, if it was asked and did not fail."""
        known = self._known.get(f"{tool}: {_key(cell)}")
        return Said(verdicts=tuple(known["verdicts"]), grave=tuple(known["grave"])) if known else None

    def keep_said(self, tool: str, cell: Cell, said: Said) -> None:
        """Keeps what another tool said."""
        self._write(f"{tool}: {_key(cell)}", asdict(said))

    def _write(self, key: str, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"of": key, **entry, "commit": self._commit}))


def _key(cell: Cell) -> str:
    return " ".join((cell.kind, str(cell), *cell.base))


def commit() -> str:
    """Returns the commit of this checkout; empty if it is none."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip()
