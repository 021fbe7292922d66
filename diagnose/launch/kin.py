"""Which processes belong to this run: its ranks, their workers, whatever they started."""

from __future__ import annotations

import os

FARTHEST = 32
"""Generations that are followed."""


class Kin:
    """The processes that descend from the one that began this run.

    That is the supervisor that `diagnose run` started, torchrun's agent, or this very process.
    """

    def __init__(self) -> None:
        roots = {os.getpid()}
        supervisor = os.environ.get("DIAGNOSE_SUPERVISOR", "")
        if supervisor.isdecimal() and int(supervisor) in _line(os.getpid()):
            roots.add(int(supervisor))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            roots.add(os.getppid())
        self._roots = roots

    def has(self, pid: int) -> bool:
        """Whether a process is one of them. One that has just ended is taken for one: it is nobody's."""
        line = _line(pid)
        return not line or not self._roots.isdisjoint(line)


def _line(pid: int) -> list[int]:
    """Returns a process and its ancestors, nearest first; nothing where it is not there."""
    line: list[int] = []
    while pid > 0 and len(line) < FARTHEST:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            break
        line.append(pid)
        pid = parent
    return line
