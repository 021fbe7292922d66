"""Commands from the dashboard to a running job: a file each, in the run's folder, taken by the flusher.

The flusher's thread looks at the folder's time of change twice a second; the training thread looks at an
empty queue at the end of a step, and only in a job that is tuned. A command is one of a fixed list of
words with one word as its argument: it is compared with what is known, and never run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diagnose.core.command import Command

FOLDER = "control"
MAX_BYTES = 1000
"""A command takes a tenth of it; what is longer is none."""

MAX_WAITING = 100
"""More files than a person makes: the rest waits."""

NAME = re.compile(r"[0-9]{20}-[0-9a-f]{8}\.json")


def send(run: Path, command: Command) -> None:
    """Leaves a command for the job that records into a folder.

    Raises:
        OSError: If the folder cannot be written.
    """
    import secrets  # only the sender needs it, not the job

    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    hidden = folder / f".{name}"
    hidden.write_text(json.dumps(asdict(command)), encoding="utf-8")
    hidden.rename(folder / f"{name}.json")  # whole, or not there


class Inbox:
    """The job's side. Lives in the flusher's thread.

    Args:
        run: The run's folder.
        event: Writes down what happened, as `Recorder.event`.
        hand_over: Takes a command for the tuner; returns why it cannot, else an empty text.
        deep_window: Takes the command for a deep window, likewise.
    """

    def __init__(
        self,
        run: Path,
        event: Callable[..., None],
        hand_over: Callable[[Command], str] | None,
        deep_window: Callable[[], str] | None = None,
    ) -> None:
        self._folder = run / FOLDER
        self._event = event
        self._hand_over = hand_over
        self._deep_window = deep_window
        self._seen_ns = 0
        self._pid = os.getpid()

    def look(self) -> None:
        """Takes the commands that have come since the last look. Costs one question to the file system."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
        except OSError:
            return
        if changed_ns == self._seen_ns or os.getpid() != self._pid:  # a fork takes none
            return
        self._seen_ns = changed_ns
        names = sorted(name for name in os.listdir(self._folder) if NAME.fullmatch(name))
        for name in names[:MAX_WAITING]:
            self._take(self._folder / name)

    def _take(self, path: Path) -> None:
        mine = path.with_name(f".{path.stem}.{self._pid}")
        try:
            path.rename(mine)
        except OSError:  # another process of the script was quicker, or it cannot be taken away
            return
        command, problem = _parsed(mine)
        with contextlib.suppress(OSError):
            mine.unlink()
        if command is None:
            self._event("command", command="unknown", argument="", state="refused", reason=problem)
            return
        self._event("command", **asdict(command), state="received", reason="")
        refusal = self._refusal(command)
        if refusal:
            self._event("command", **asdict(command), state="refused", reason=refusal)

    def _refusal(self, command: Command) -> str:
        if command.command == "deep-window":
            return self._deep_window() if self._deep_window is not None else "no deep window can be taken"
        if self._hand_over is None:
            return "this run is not tuned: start it with --tune"
        return self._hand_over(command)


def _parsed(path: Path) -> tuple[Command | None, str]:
    """Returns the command in a file, or why there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, MAX_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(text) > MAX_BYTES:
            return None, "it is too long for a command"
        asked: Any = json.loads(text)
        if not isinstance(asked, dict) or set(asked) != {"command", "argument"}:
            return None, "it is no command"
        return Command(**asked), ""
    except OSError as error:
        return None, f"it cannot be read ({error.strerror})"
    except (ValueError, TypeError, RecursionError) as error:
        return None, str(error)
