"""A dashboard beside a run: a process of its own, on a socket that is there before it is."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from diagnose.launch.beside import end_beside, start_beside
from diagnose.launch.settings import is_found_by_name

PORT = 8050
NEXT_PORTS = 20
"""Ports tried after the usual one: there may be several dashboards on one machine."""

LOOPBACK = "127.0.0.1"

TOKEN_VARIABLE = "DIAGNOSE_DASHBOARD_TOKEN"
"""Hands the token over: what stands on a command line, everybody on the machine can read."""

ADDRESS_FILE = "dashboard.url"
LOG_FILE = "dashboard.log"

LINGERS_S = 5.0
"""So long a dashboard stays at most where a page is open, to show there how the run ended."""

ENDS_WITHIN_S = LINGERS_S + 5.0
"""Longer than this the end of a run does not wait for its dashboard."""


@dataclass(slots=True, kw_only=True)
class Opened:
    """A dashboard that was started.

    Attributes:
        address: Where a browser finds it, with the token.
        process: Its process.
        folder: The run's folder.
    """

    address: str
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def command(self) -> str:
        """What opens one again."""
        if is_found_by_name(self.folder):
            return f"diagnose dashboard {self.folder.name}"
        where = shlex.quote(os.path.relpath(self.folder.parent))
        return f"diagnose dashboard {self.folder.name} --run-dir {where}"

    def close(self) -> None:
        """Ends it; where a page is open, once that shows how the run ended, or at Ctrl-C."""
        with contextlib.suppress(OSError):
            (self.folder / ADDRESS_FILE).unlink()
        end_beside(self.process, ENDS_WITHIN_S)


def open_beside(folder: Path) -> Opened:
    """Starts a dashboard for a run that is about to begin; takes connections from now on.

    Imports of a second or two are made in the other process; till then a browser waits. What it says goes
    to a file in the run's folder.

    Args:
        folder: The run's folder, absolute.

    Raises:
        OSError: If no port can be had, no process be started, or the folder takes no file.
    """
    listening = listening_on(LOOPBACK, PORT, NEXT_PORTS)
    token = secrets.token_urlsafe(24)
    address = address_of(listening, LOOPBACK, f"/run/{folder.name}", token)
    with listening:
        number = listening.fileno()
        process = start_beside(
            ["dashboard", "--run-dir", str(folder.parent), "--socket-fd", str(number)],
            folder / LOG_FILE,
            variables={TOKEN_VARIABLE: token},
            files=(number,),
        )
    _leave_address(folder, address)
    return Opened(address=address, process=process, folder=folder)


def listening_on(host: str, port: int, others: int = 0) -> socket.socket:
    """Returns a socket that listens; connections wait in it until a server takes them.

    Args:
        host: The address.
        port: The port; 0 for any.
        others: Try so many ports after it when it is taken.

    Raises:
        OSError: If no port could be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + others, 65535) if port else 0
    for number in range(port, last + 1):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host.strip("[]"), number))
            listening.listen(128)
        except OSError:
            listening.close()
            if number == last:
                raise
        else:
            return listening
    raise AssertionError("unreachable")


def address_of(listening: socket.socket, host: str, path: str, token: str) -> str:
    """Returns the address of a page, with the token that lets its reader in."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host.strip("[]")
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{listening.getsockname()[1]}{path}?token={token}"


def _leave_address(folder: Path, address: str) -> None:
    """Writes the address where those find it who see no start line; readable by its owner alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / ADDRESS_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(address + "\n")
