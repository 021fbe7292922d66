"""A process of ours beside a run. It ends when its stdin is closed, so also when we are killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

OF_THE_RUN = ("DIAGNOSE_RUN", "DIAGNOSE_SUPERVISOR", "PYTHONSTARTUP")


def start_beside(
    arguments: Sequence[str],
    log: Path,
    *,
    variables: Mapping[str, str] | None = None,
    files: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts `diagnose` in a session of its own: Ctrl-C is the script's.

    Args:
        arguments: What follows `diagnose`.
        log: Where it writes what it says.
        variables: Set for it beside the environment's.
        files: Open files that it keeps.

    Raises:
        OSError: If it cannot be started, or the file not be made.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in OF_THE_RUN}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "diagnose", *arguments],
            env={
                **inherited,
                **(variables or {}),
                # One thread: numpy must not take the cores that the script trains on.
                "OMP_NUM_THREADS": "1",
                # A `flask.py` or a `wandb` folder beside the user's script is not the package.
                "PYTHONSAFEPATH": "1",
            },
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            pass_fds=files,
            start_new_session=True,
        )


def end_beside(process: subprocess.Popen[bytes], within_s: float) -> int | None:
    """Lets a process end; returns its exit code, or `None` if it took too long, or Ctrl-C came before."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        return process.wait(timeout=within_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
        return None
