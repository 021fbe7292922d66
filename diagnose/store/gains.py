"""The ledger of predictions: one JSON object per line, only appended to, for all projects of a user."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diagnose.core.finding import Gain
from diagnose.core.prediction import Prediction

FILE = "gains.jsonl"
VERSION = 1


def ledger_path() -> Path:
    """Returns where the ledger is: in `DIAGNOSE_STATE`, else in `diagnose` under `XDG_STATE_HOME`."""
    state = os.environ.get("DIAGNOSE_STATE")
    if state:
        return Path(state) / FILE
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "diagnose" / FILE


def read_predictions() -> list[Prediction]:
    """Returns every prediction that can be read, in the order they were noted.

    A line that is torn, or of a newer version, is left out.
    """
    try:
        text = ledger_path().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    read = (_parsed(line) for line in text.splitlines())
    return [prediction for prediction in read if prediction is not None]


def note_prediction(prediction: Prediction) -> bool:
    """Appends a prediction, unless its pair of runs is in the ledger already; says whether it did.

    Raises:
        OSError: If the ledger cannot be written.
    """
    pair = (prediction.before, prediction.after)
    if any((known.before, known.after) == pair for known in read_predictions()):
        return False
    path = ledger_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"version": VERSION, **asdict(prediction)}) + "\n"
    with path.open("a+b") as file:
        # A line that a crash left without its end must not take this one with it.
        if file.seek(0, os.SEEK_END) and not _ends_with_newline(file):
            line = "\n" + line
        file.write(line.encode())
    return True


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


def _parsed(line: str) -> Prediction | None:
    try:
        entry = json.loads(line)
        if entry.pop("version") != VERSION:
            return None
        return Prediction(
            **{
                **entry,
                "rules": tuple(map(str, entry["rules"])),
                "predicted": Gain(**entry["predicted"]),
                "measured": Gain(**entry["measured"]),
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
