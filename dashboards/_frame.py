"""What surrounds every page: the bar at the top, the navigation, the clock, and the place of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash_mantine_components as dmc
from dash import Dash, Input, Output, State, dcc, html
from diagnose.dashboards.base import RUN, Page, href

TICK_MS = 1000
NAVBAR = {"width": 200, "breakpoint": "sm", "collapsed": {"mobile": True}}
THEME = {
    "primaryColor": "orange",
    "defaultRadius": "md",
    "fontFamily": 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif',
    "fontFamilyMonospace": 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
}

OPEN_MENU = """
function(opened, navbar) {
    return {...navbar, collapsed: {mobile: !opened}};
}
"""
CLOSE_MENU = """
function(pathname, search) {
    if (window.diagnosePath && window.diagnosePath !== pathname) { window.scrollTo(0, 0); }
    window.diagnosePath = pathname;
    return false;
}
"""


def frame(pages: Mapping[str, Page]) -> Any:
    """Returns the components around the page. Follows the system's dark mode until the reader chooses."""
    header = html.Div(
        [
            dmc.Burger(id="menu", opened=False, hiddenFrom="sm", size="sm", **{"aria-label": "Pages"}),
            dcc.Link("diagnose", href="/", className="brand"),
            html.Span(id="where", className="where"),
            dmc.ColorSchemeToggle(
                lightIcon="Dark mode",
                darkIcon="Light mode",
                variant="subtle",
                color="gray",
                size="lg",
                className="scheme",
                **{"aria-label": "Switch between dark and light"},
            ),
        ],
        className="topbar",
    )
    shell = dmc.AppShell(
        [
            html.A("Skip to the page", href="#page", className="skip"),
            dmc.AppShellHeader(header),
            dmc.AppShellNavbar(
                html.Div(_links(pages, None, ""), id="pages"), p="xs", **{"aria-label": "Pages"}
            ),
            dmc.AppShellMain(html.Div(id="page", className="content", tabIndex=-1)),
        ],
        id="shell",
        header={"height": 48},
        navbar=NAVBAR,
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="url"),
            dcc.Interval(id="tick", interval=TICK_MS),
            dcc.Store(id="view"),
            shell,
        ],
        defaultColorScheme="auto",
        theme=THEME,
    )


def register(app: Dash) -> None:
    """Registers the navigation, which follows the page, and the menu of narrow windows."""
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')

    @app.callback(  # type: ignore[untyped-decorator]
        Output("pages", "children"), Output("where", "children"), Input("view", "data")
    )
    def follow(view: dict[str, Any] | None) -> tuple[Any, str]:
        view = view or {}
        run = view.get("run")
        return _links(app.pages, run, str(view.get("page", ""))), str(run or "")

    app.clientside_callback(
        OPEN_MENU, Output("shell", "navbar"), Input("menu", "opened"), State("shell", "navbar")
    )
    app.clientside_callback(
        CLOSE_MENU, Output("menu", "opened"), Input("url", "pathname"), Input("url", "search")
    )


def _links(pages: Mapping[str, Page], run: str | None, current: str) -> list[Any]:
    ordered = sorted(pages.items(), key=lambda item: item[1].order)
    links = [_link(page.title, href(name), name == current) for name, page in ordered if not page.of_run]
    if run is None:
        return links
    of_run = [
        _link("Overview" if name == RUN else page.title, href(name, run), name == current)
        for name, page in ordered
        if page.of_run
    ]
    return [*links, html.P("This run", className="group"), *of_run]


def _link(title: str, address: str, current: bool) -> Any:
    spoken = {"aria-current": "page"} if current else {}
    return dmc.NavLink(label=title, href=address, active=current, **spoken)
