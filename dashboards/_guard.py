"""Who may read the dashboard, and what a browser may do with it: checks before each request, headers after.

A web page that the reader has open elsewhere can send requests to 127.0.0.1, and can name it by a host of
its own (DNS rebinding). So the Host header must be ours, a request that asks for something must come from
our own page, and what changes a job needs a token that only the terminal was told.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Callable
from html import escape
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from flask import Flask, Response, g, request

OPEN = "Open the address that the terminal printed."
COOKIE = "diagnose_token"
MAX_REQUEST_BYTES = 1_000_000
"""What a callback sends is a hundredth of this."""

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, no inline script but Dash's own, by their hashes. Plotly sets inline styles."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def new_token() -> str:
    """Returns a token that nobody can guess."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone: `localhost`, `127.0.0.1`, `::1`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """The door of one server.

    Args:
        host: The address it is bound to. On one that others can reach, every request needs the token.
        token: What the terminal was told.

    Attributes:
        token: The same.
        loopback: Whether only this machine can reach the server.
    """

    def __init__(self, host: str, token: str) -> None:
        self.token = token
        self.loopback = is_loopback(host)
        self._host = host

    def install(self, server: Flask, hashes: Callable[[], str]) -> None:
        """Puts the checks before every request, and the headers on every answer.

        Args:
            server: What serves the app.
            hashes: Returns the hashes of the inline scripts that may run; asked with each answer.
        """
        server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES

        @server.before_request
        def check() -> Response | None:
            return self._check()

        @server.after_request
        def add_headers(response: Response) -> Response:
            response.headers.update(HEADERS)
            policy = CONTENT_SECURITY_POLICY.format(hashes=hashes())
            response.headers["Content-Security-Policy"] = policy
            if not request.path.startswith(("/_dash-component-suites/", "/assets/")):
                response.headers["Cache-Control"] = "no-store"
            return response

    def may_control(self) -> bool:
        """Whether the request at hand comes from this machine, by someone whom the terminal told the
        token."""
        return self.loopback and is_loopback(request.remote_addr or "") and self._has_cookie()

    def _check(self) -> Response | None:
        host, _ = _name_and_port(request.host)
        if not self._is_ours(host):
            return _refuse(
                403,
                f"This dashboard is not called {host[:100]!r}. Open the address that the terminal printed.",
            )
        if not self._from_our_page():
            return _refuse(403, "This request comes from another page.")
        given = request.args.get("token")
        if given is not None and request.method == "GET":
            if not self._matches(given):
                return _refuse(401, f"The token is of another dashboard. {OPEN}")
            return self._let_in()
        if not self.loopback and not self._has_cookie():
            return _refuse(401, f"This dashboard needs a token. {OPEN}")
        g.trusted = self.may_control()
        return None

    def _is_ours(self, host: str) -> bool:
        if is_loopback(host) or host == self._host.strip("[]"):
            return True
        # Bound to every address of the machine its names are not known; there the token keeps others out,
        # and a browser does not send it to a name that was not given it.
        return not self.loopback

    def _from_our_page(self) -> bool:
        if request.method in ("GET", "HEAD"):
            return True
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        origin = request.headers.get("Origin")
        ours = (f"http://{request.host}", f"https://{request.host}")
        return site == "same-origin" and (origin is None or origin in ours)

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _has_cookie(self) -> bool:
        return self._matches(request.cookies.get(self._cookie, ""))

    @property
    def _cookie(self) -> str:
        """The cookie's name: cookies know no ports, and there may be two dashboards."""
        return f"{COOKIE}_{_name_and_port(request.host)[1]}"

    def _let_in(self) -> Response:
        """Sets the cookie, and goes on to the same address without the token.

        By a page and not by a redirect: a browser that came from elsewhere would not send a strict cookie
        along on a redirect.
        """
        rest = [(key, value) for key, value in request.args.items(multi=True) if key != "token"]
        path = "/" + request.path.lstrip("/\\")  # `//elsewhere` would be another host
        path = quote(path)  # a browser leaves out tabs and line ends
        address = escape(f"{path}?{urlencode(rest)}" if rest else path)
        refresh = f'<meta http-equiv="refresh" content="0;url={address}">'
        page = f'<!doctype html><title>diagnose</title>{refresh}<a href="{address}">Open</a>'
        response = Response(page, mimetype="text/html")
        response.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict")
        return response


def _name_and_port(host: str) -> tuple[str, int]:
    """Returns the two parts of a Host header; no name where it is not one."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "", parts.port or 80
    except ValueError:
        return "", 80


def _refuse(status: int, words: str) -> Response:
    return Response(f"diagnose: {words}\n", status=status, mimetype="text/plain")


def trusted() -> Any:
    """Whether the request at hand may control a job."""
    return g.get("trusted", False)
