"""Tells from a run's files, and from the process table, whether it goes on."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnose.core.liveness import Liveness, State
from diagnose.store.meta import read_meta
from diagnose.store.runs import rank_files, read_manifest

CLOCKS_DIFFER_S = 2.0
"""A process that began so much later than the run's last record has only inherited its number."""


def liveness(run: Path, facts: Sequence[Mapping[str, Any]] | None = None) -> Liveness:
    """Returns how a run stands now.

    Args:
        run: The run's folder.
        facts: What its ranks say of themselves, from whoever has just read it; default: their files are
            read. Of some ranks alone, the first among them, `RUNNING` is right, and so is `ENDED` where
            `run.json` says so.
    """
    manifest = read_manifest(run)
    if facts is None:
        facts = [_facts(path) for path in rank_files(run)]
    written = [fact["updated_unix"] for fact in facts if "updated_unix" in fact]
    last = max(written, default=None)
    first = facts[0] if facts else {}
    host = str(first.get("host") or manifest.get("host") or "")
    # The supervisor's comes last: a script may go on when it has stopped training.
    pids = [*(fact.get("pid") for fact in facts), manifest.get("pid")]
    known = [pid for pid in pids if isinstance(pid, int)]
    closed = bool(facts) and all(fact.get("finished") for fact in facts)
    seen = last or manifest.get("started_unix") or time.time()
    if manifest.get("ended_unix"):
        state = State.ENDED
    elif host == socket.gethostname() and any(_is_alive(pid, seen) for pid in known):
        state = State.RUNNING
    elif closed:
        state = State.ENDED
    else:
        state = State.GONE if host == socket.gethostname() and known else State.CANNOT_TELL
    return Liveness(
        state=state,
        host=host,
        pid=known[0] if known else None,
        last_record_s=None if last is None else max(0.0, time.time() - last),
    )


def _facts(path: Path) -> dict[str, Any]:
    """Reads what a rank says of itself, without its steps; nothing where the file cannot be read."""
    try:
        facts = read_meta(path)
    except (sqlite3.DatabaseError, ValueError):
        return {}
    state = facts.pop("state", {})
    return {**facts, **state}


def _is_alive(pid: int, seen_unix: float) -> bool:
    """Whether a process of this number is there, no zombie, and old enough to have left the last record."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no /proc here, or just gone
        return True
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)  # in a container /proc/uptime may be its own
    age_s = since_boot_s - int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return stat[0] != "Z" and time.time() - age_s < seen_unix + CLOCKS_DIFFER_S
