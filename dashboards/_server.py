"""The Dash app: pages found in this folder, a frame around them, a guard before them."""

from __future__ import annotations

import logging
import shlex
import socket
from html import escape
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, ctx, html, no_update
from diagnose.dashboards import _frame
from diagnose.dashboards._guard import Guard, is_loopback, new_token, trusted
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import Page, view_of
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from diagnose import dashboards
from diagnose.core.errors import DiagnoseError
from diagnose.core.plugins import discover

HIDDEN_MS = 24 * 3600 * 1000
TICK_MS = 1000

PAUSE = f"""
function() {{
    const pace = () => dash_clientside.set_props(
        "tick", {{interval: document.hidden ? {HIDDEN_MS} : {TICK_MS}}});
    if (!window.diagnosePaced) {{
        window.diagnosePaced = true;
        document.addEventListener("visibilitychange", pace);
    }}
    return document.hidden ? {HIDDEN_MS} : {TICK_MS};
}}
"""
"""A tab that nobody sees asks for nothing."""


class DashboardApp(Dash):
    """The app, with what its pages read.

    Attributes:
        source: The runs.
        guard: The door.
        pages: By name.
    """

    source: Source
    guard: Guard
    pages: dict[str, Page]


def create_app(root: Path, *, host: str = "127.0.0.1", token: str | None = None) -> DashboardApp:
    """Returns the app for the runs under a folder.

    Args:
        root: The folder that the runs lie in.
        host: The address that it will be served on.
        token: What lets a reader in (where others can reach the host) and control a job (on this machine
            only). Default: a new one, see `app.guard.token`.
    """
    app = DashboardApp(
        __name__,
        assets_folder=str(Path(__file__).with_name("assets")),
        title="diagnose",
        update_title=None,
        suppress_callback_exceptions=True,  # the callbacks of a page that is not shown
        serve_locally=True,
        compress=False,
        enable_mcp=False,
        add_log_handler=False,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
            {"name": "diagnose-reopen", "content": escape(_options(root, host))},  # for `gone.js`
        ],
    )
    app.guard = Guard(host, token or new_token())
    app.source = Source(root, trusted=trusted)
    app.pages = discover(dashboards, Page)
    app.layout = _frame.frame(app.pages)
    _frame.register(app)
    _route(app)
    _keep_time(app)
    for page in app.pages.values():
        page.callbacks(app, app.source)
    hashes = " ".join(app.csp_hashes())  # only now: a callback registered later has no hash in it
    app.guard.install(app.server, lambda: hashes)
    return app


def _options(root: Path, host: str) -> str:
    """Returns the options that open the same dashboard again, wherever they are pasted."""
    elsewhere = "" if is_loopback(host) else f"--host {shlex.quote(host)} "
    return f"{elsewhere}--run-dir {shlex.quote(str(root.absolute()))}"


def _route(app: DashboardApp) -> None:
    @app.callback(  # type: ignore[untyped-decorator]
        Output("page", "children"),
        Output("view", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("view", "data"),
    )
    def show(
        pathname: str | None, search: str | None, shown: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        view = view_of(pathname or "/", search or "")
        data = {"page": view.page, "run": view.run, "query": dict(view.query)}
        page = app.pages.get(view.page)
        if page is None or page.of_run is not (view.run is not None):
            return _sorry(f"There is no page {pathname!r}."), {**data, "run": None}
        try:
            if view.run is not None:
                app.source.folder(view.run)
            if page.follows_query and shown and (shown["page"], shown["run"]) == (view.page, view.run):
                return no_update, data
            return page.layout(view, app.source), data
        except DiagnoseError as error:
            return _sorry(str(error)), {**data, "run": None}


def _sorry(words: str) -> Any:
    return html.Div(
        [html.H1("Nothing here"), html.P(words), html.A("All runs", href="/")], className="nothing-here"
    )


def _keep_time(app: DashboardApp) -> None:
    """Stops the clock of a page whose run is over, and of a tab that is hidden."""

    @app.callback(  # type: ignore[untyped-decorator]
        Output("tick", "disabled"),
        Input("tick", "n_intervals"),
        Input("view", "data"),
        State("tick", "disabled"),
    )
    def stop(_: int | None, view: dict[str, Any] | None, stopped: bool | None) -> Any:
        run = (view or {}).get("run")
        # What another view needs may take a moment to be read: the first tick behind it tells.
        over = ctx.triggered_id == "tick" and run is not None and app.source.is_settled(str(run))
        return over if over is not bool(stopped) else no_update

    app.clientside_callback(PAUSE, Output("tick", "interval"), Input("url", "pathname"))


class _QuietHandler(WSGIRequestHandler):
    """Neither logs requests nor tells a stranger which versions run here."""

    protocol_version = "HTTP/1.1"

    def version_string(self) -> str:
        return "diagnose"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


def server_of(app: DashboardApp, listening: socket.socket) -> BaseWSGIServer:
    """Returns a server for the app on a socket that listens; `serve_forever` runs it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    host, port = listening.getsockname()[:2]
    return make_server(
        host, port, app.server, threaded=True, request_handler=_QuietHandler, fd=listening.fileno()
    )
