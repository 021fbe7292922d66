"""What a rank says of itself, read alone: without its steps, and without numpy."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote


def read_only(path: Path) -> str:
    """Returns SQLite's address of a file that is to be read and not to be made."""
    return f"file:{quote(os.fsencode(path.absolute()))}?mode=ro"


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the facts in a rank's file by name, the latest of its `state` among them.

    Raises:
        sqlite3.DatabaseError: If it cannot be read; likewise `ValueError`.
    """
    with closing(sqlite3.connect(read_only(path), uri=True, timeout=5)) as db:
        return {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM meta")}
