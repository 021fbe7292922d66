"""torchrun started by us, `diagnose run --nproc-per-node 2 x.py`, and us started by torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diagnose.launch.process_clock import started_unix
from diagnose.launch.run_folder import folder_name


def torchrun_arguments(options: Mapping[str, str | int | float | bool | None]) -> list[str]:
    """Returns what to put after `python` to start every rank, before the script; nothing without options.

    Args:
        options: torchrun's options by name, with underscores; `None` and `False` where one was not given.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    if not given:
        return []
    arguments = ["-m", "torch.distributed.run"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        arguments.append(flag if value is True else f"{flag}={value}")
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's place among the ranks that an outer torchrun started.

    Attributes:
        rank: 0 is the one that prints.
        folder: Name of the run's folder, the same on every rank of this host.
        path: The run's folder itself, where the user gave it in `DIAGNOSE_RUN_DIR`.
    """

    rank: int
    folder: str
    path: Path | None


def place_in_torchrun(environ: Mapping[str, str], name: str) -> Place | None:
    """Returns which rank this is, or `None` for a job of one process.

    No rank can ask another for a folder before the script has made a process group, so each derives the
    same name from what they share: the launcher's parameters, and the time at which the launcher started.
    The agents of several hosts start at different times; there, `DIAGNOSE_RUN_DIR` names the one folder.

    Args:
        environ: The environment that torchrun made.
        name: What the user calls the run.
    """
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if world_size < 2:
        return None
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id == "none":  # torchrun's own default, the same for every job
        run_id = f"{environ.get('MASTER_ADDR', '')}-{environ.get('MASTER_PORT', '')}"
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0":
        run_id += f"-restart{restarts}"
    started = started_unix(os.getppid())
    if started is None:
        run_id += f"-{os.getppid()}"
    folder = folder_name(time.localtime(started or 0), f"{name}-{run_id}")
    path = environ.get("DIAGNOSE_RUN_DIR", "")
    return Place(rank=rank, folder=folder, path=Path(path) if path else None)


LATE_RANK_S = 2.0
"""How long rank 0 waits with its report for the others: they end together, or something is wrong."""


class RanksAtWork:
    """The ranks of one host that record into a folder, each until its script has ended.

    A shared lock on the folder itself: it is let go however a process dies, and leaves no file behind.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks: nobody waits
            fcntl.flock(self._folder, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Says that this rank's script has ended."""
        os.close(self._folder)

    def wait_for_others(self) -> None:
        """Waits until every other rank has left, but not for long."""
        deadline = time.monotonic() + LATE_RANK_S
        while not self._is_alone() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True
