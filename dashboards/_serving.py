"""The dashboard as a process: alone, or beside a run that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

from diagnose.dashboards._guard import is_loopback, new_token
from diagnose.dashboards._server import create_app, server_of
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import RUN, RUNS, href

from diagnose.core.errors import DiagnoseError
from diagnose.launch.opened import (
    LINGERS_S,
    NEXT_PORTS,
    TOKEN_VARIABLE,
    address_of,
    listening_on,
)

POLLED_S = 3.0
"""A page asks each second; one that has not for so long is closed, hidden, or has been told of the end."""
SHOWN_S = 1.5
"""By then each page has asked once more."""

NICENESS = 5
"""Beside a training job of ours, the job goes first."""


def serve(root: Path, run: str | None, host: str, port: int, *, any_port: bool, opens: bool) -> None:
    """Serves until Ctrl-C or a signal to end.

    Args:
        root: The folder that the runs lie in.
        run: The run to open; `None` opens the list.
        host: The address to serve on.
        port: The port.
        any_port: Whether one of the next ports will do.
        opens: Whether to open a browser, where there is one to open.

    Raises:
        DiagnoseError: If the port is taken.
    """
    try:
        listening = listening_on(host, port, NEXT_PORTS if any_port else 0)
    except OSError as error:
        raise DiagnoseError(
            f"diagnose dashboard: cannot listen on {host} port {port}: {error.strerror or error}.\n"
            "Choose another port, or let it take a free one: --port 0"
        ) from error
    token = new_token()
    address = address_of(listening, host, href(RUN if run else RUNS, run), token)
    print(f"diagnose: dashboard at {address}  (Ctrl-C ends it)", file=sys.stderr)
    if not is_loopback(host):
        print(
            f"diagnose: {host} can be reached by others, unencrypted: the token in the address is all that "
            "keeps them out. Safer: leave --host out, and use an ssh tunnel.",
            file=sys.stderr,
        )
    sys.stderr.flush()
    app = create_app(root, host=host, token=token)
    server = server_of(app, listening)
    if opens and (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()
        app.source.close()


def serve_child(root: Path, socket_fd: int) -> None:
    """Serves on a socket that the parent listens on, until it closes our stdin or is no more.

    A page that is open then is still shown how the run ended.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    app = create_app(root, token=os.environ.pop(TOKEN_VARIABLE))
    server = server_of(app, socket.socket(fileno=socket_fd))

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        linger(app.source)
        server.shutdown()

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        server.serve_forever()
    finally:
        app.source.close()


def linger(source: Source) -> None:
    """Waits until the pages that are open show how their runs ended; `LINGERS_S` at most."""
    watched = source.watched(POLLED_S)
    if not watched:
        return
    last = monotonic() + LINGERS_S - SHOWN_S
    while monotonic() < last and not all(live.snapshot().over for live in watched):
        sleep(0.1)
    sleep(SHOWN_S)
