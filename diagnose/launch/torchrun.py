"""torchrun started by us, `diagnose run --nproc-per-node 2 x.py`, and us started by torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diagnose.launch.process_clock import started_unix
from diagnose.launch.run_folder import folder_name, named


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
        rank: 0 is the one that prints; where it is not known, that is whoever makes the folder, or finds no
            run in the one that the user gave.
        folder: Name of the run's folder, the same on every rank of this host.
        path: The run's folder itself, where the user gave it in `DIAGNOSE_RUN_DIR`.
        late_s: How much later than another host this one may come and still find its folder; `None` where
            the folder's name is that of one launch and no other.
    """

    rank: int | None
    folder: str
    path: Path | None = None
    late_s: float | None = None


def place_in_torchrun(environ: Mapping[str, str], name: str) -> Place | None:
    """Returns which rank this is, or `None` for a job of one process.

    No rank can ask another for a folder before the script has made a process group, so each derives the
    same name from what they share: the launcher's parameters, and the time at which the launcher started.
    The agents of several hosts start at different times; their ranks share the job's own name, and begin
    within moments of each other.

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
    again = "" if restarts == "0" else f"-restart{restarts}"
    path = environ.get("DIAGNOSE_RUN_DIR", "")
    if path:
        return Place(rank=rank, folder=Path(path).name, path=Path(path))
    started = started_unix(os.getppid())
    # Else nothing but the name would tell this launch's folder from the last one's.
    is_spread = environ.get("GROUP_WORLD_SIZE", "1") != "1"
    # A launcher of another kind may be anything, such as a shell that starts one job after the other.
    if started is None or is_spread or "TORCHELASTIC_RUN_ID" not in environ:
        # Each host's agent counts its own restarts: in the name they would lead the hosts apart.
        common = named(f"{name}-{job_id(environ) or run_id}{'' if is_spread else again}")
        return Place(rank=rank, folder=common, late_s=RANKS_LATE_S)
    return Place(rank=rank, folder=folder_name(time.localtime(started), f"{name}-{run_id}{again}"))


def place_of_node(
    options: Mapping[str, Any], environ: Mapping[str, str], name: str, *, is_given: bool
) -> Place | None:
    """Returns this host's place among those whose ranks torchrun starts for us; `None` for a single host.

    They may begin minutes apart, so nothing but a name tells them that they belong together.

    Args:
        options: torchrun's.
        environ: The environment.
        name: What the user calls the run, or the script's.
        is_given: Whether it is the user who does.
    """
    if str(options.get("nnodes") or 1).rpartition(":")[2] == "1":
        return None
    path = environ.get("DIAGNOSE_RUN_DIR", "")
    end = options.get("rdzv_endpoint") or f"{options.get('master_addr')}-{options.get('master_port')}"
    job = job_id(environ) or options.get("rdzv_id") or end
    rank = options.get("node_rank")
    if rank is None and environ.get("SLURM_NODEID", "").isdecimal():
        rank = int(environ["SLURM_NODEID"])
    return Place(
        rank=rank,
        folder=name if is_given else named(f"{name}-{job}"),
        path=Path(path) if path else None,
        late_s=HOSTS_LATE_S,
    )


def launched_unix(environ: Mapping[str, str]) -> float | None:
    """Returns when the agent of torchrun that started this rank did, in seconds since 1970; `None` without
    one. It is older than all attempts of its job, whichever of them this rank is of: an agent counts only
    the restarts that its own ranks were the cause of."""
    started = started_unix(os.getppid()) if "TORCHELASTIC_RUN_ID" in environ else None
    return None if started is None else started + ROUNDING_S


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Whether the agent says itself that it has started this rank anew: also where the rank's parent is not
    the agent, but a shell, or the system does not tell when a process started."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "") not in ("", "0")


def job_id(environ: Mapping[str, str]) -> str:
    """Returns what the cluster calls the job, the same on all hosts; empty where there is none."""
    return next((environ[name] for name in JOB_IDS if environ.get(name)), "")


ROUNDING_S = 1.0
"""The time at which a process started may be told so much too early. No attempt ends as soon as that."""

JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")

RANKS_LATE_S = 60.0
"""Ranks are started on all hosts as soon as their launchers have met."""

HOSTS_LATE_S = 600.0
"""Launchers wait for each other: this is the usual patience of a job."""


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
