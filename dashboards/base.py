"""What a page of the dashboard is, and what its address says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlencode

if TYPE_CHECKING:
    from diagnose.dashboards._source import Source

RUNS, RUN = "runs", "run"
"""The two pages that have no name in the address: `/` and `/run/<id>`."""

MAX_QUERY_FIELDS = 20
"""More fields than any view has; an address with more is cut off there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What an address asks for.

    Attributes:
        page: Name of the page.
        run: The run it is about; `None` for a page about all of them.
        query: The fields after the question mark. Foreign text, like `run` until it was looked up.
    """

    page: str = RUNS
    run: str | None = None
    query: Mapping[str, str] = field(default_factory=dict)


class Page:
    """One page. The docstring says what it shows.

    Every view of it has an address: what the reader chose is in the query, not in a hidden state.

    Attributes:
        title: Its name in the navigation.
        order: Its place there; smaller is first.
        of_run: Whether it is about one run (`/run/<id>/<name>`) or about all (`/<name>`).
        follows_query: Whether its callbacks show what the query asks for, so that a change of it leaves
            the layout, and where the reader is in it; else the page is laid out anew.
    """

    title: ClassVar[str]
    order: ClassVar[int] = 50
    of_run: ClassVar[bool] = True
    follows_query: ClassVar[bool] = False

    def layout(self, view: View, source: Source) -> Any:
        """Returns the page's components. Called in a request: reads what is there and waits for nothing."""
        raise NotImplementedError

    def callbacks(self, app: Any, source: Source) -> None:
        """Registers what keeps the page up to date. Called once, before the server starts."""


def href(page: str = RUNS, run: str | None = None, **query: str) -> str:
    """Returns the address of a view."""
    path = "/" if page == RUNS else f"/{quote(page, safe='')}"
    if run is not None:
        path = f"/run/{quote(run, safe='')}" + ("" if page == RUN else path)
    return f"{path}?{urlencode(query)}" if query else path


def view_of(pathname: str, search: str) -> View:
    """Returns what an address asks for; whether there is such a page and run is for the caller to see."""
    fields = parse_qsl(search.removeprefix("?"), keep_blank_values=True)[:MAX_QUERY_FIELDS]
    query = dict(fields)
    parts = [unquote(part) for part in pathname.split("/") if part]
    if not parts:
        return View(query=query)
    if parts[0] != RUN or len(parts) == 1:
        return View(page="/".join(parts), query=query)
    return View(page="/".join(parts[2:]) or RUN, run=parts[1], query=query)
