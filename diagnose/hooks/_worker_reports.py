"""How the reports of worker processes reach the training process: as datagrams to a socket of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any

MAX_DATAGRAM = 200_000
REPORT_KEYS = {
    "pid",
    "worker",
    "batches",
    "fetch_ns",
    "collate_ns",
    "cpu_ns",
    "rest_cpu_ns",
    "helper_cpu_ns",
    "life_ns",
    "delay_ns",
    "pieces",
    "piped_bytes",
    "opened",
    "opening",
    "spread",
    "longest_ns",
    "slowest",
    "history",
    "sightings",
    "stacks",
}


def address_of(pid: int) -> str:
    # An address that begins with NUL lives in no file system and vanishes with its socket (Linux).
    # Containers that share the host's network share these, and each counts its processes from 1.
    space = 0
    with contextlib.suppress(OSError):
        space = os.stat("/proc/self/ns/pid").st_ino
    return f"\0torch-diagnose-{space}-{pid}"


class Inbox:
    """Receives the reports of worker processes, in the training process.

    Attributes:
        loaders: Which loader each worker serves, by process: an index into the facts of loaders. Reports
            are given it, as `loader`, where it is known.
    """

    def __init__(self) -> None:
        self.loaders: dict[int, int] = {}
        self._left: set[int] = set()  # workers of an earlier measurement of this process
        self._socket: socket.socket | None = None
        self._pid = 0

    def open(self) -> None:
        """Opens the socket if this process has none yet."""
        if self._pid == os.getpid() or not sys.platform.startswith("linux"):
            return
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        opened.setblocking(False)
        opened.bind(address_of(os.getpid()))
        self._socket, self._pid = opened, os.getpid()

    def receive(self) -> list[dict[str, Any]]:
        """Returns the reports that have come since the last call."""
        reports: list[dict[str, Any]] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(MAX_DATAGRAM)
            except (BlockingIOError, InterruptedError):
                break
            with contextlib.suppress(ValueError, RecursionError):  # any process here can send anything
                report = json.loads(data)
                if isinstance(report, dict) and report.keys() == REPORT_KEYS:
                    loader = self.loaders.get(report["pid"])
                    if loader is not None or report["pid"] not in self._left:
                        reports.append(report | {"loader": loader})
        return reports

    def close(self) -> None:
        """Closes the socket."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._pid = 0
        self._left.update(self.loaders)
        self.loaders.clear()


inbox = Inbox()
