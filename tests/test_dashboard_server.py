"""The dashboard's door: who is let in, and what a browser is told."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnose.dashboards._guard import CONTENT_SECURITY_POLICY, is_loopback
from diagnose.dashboards._server import DashboardApp, create_app, server_of
from diagnose.dashboards.base import View, href, view_of

from diagnose.launch.opened import listening_on
from tests.recorded import manifest, record

TOKEN = "t0ken"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record(manifest(folder / "run", script=HOSTILE, started_unix=2.0), 300)
    record(manifest(folder / "other", started_unix=1.0), 300)
    return folder


@pytest.fixture(scope="module")
def app(root: Path) -> Iterator[DashboardApp]:
    made = create_app(root, token=TOKEN)
    yield made
    made.source.close()


def client(app: DashboardApp, *, cookie: str | None = None) -> Any:
    made = app.server.test_client()
    if cookie is not None:
        made.set_cookie("diagnose_token_80", cookie)
    return made


def callback(client: Any, inputs: dict[str, Any], outputs: list[str], **headers: str) -> Any:
    """Calls the callback that fills the page, as a browser does."""
    body = {
        "output": f"..{'...'.join(outputs)}..",
        "outputs": [dict(zip(("id", "property"), name.split("."), strict=True)) for name in outputs],
        "inputs": [
            {"id": name.split(".")[0], "property": name.split(".")[1], "value": value}
            for name, value in inputs.items()
        ],
        "changedPropIds": list(inputs),
        "state": [{"id": "view", "property": "data", "value": None}],
    }
    return client.post("/_dash-update-component", json=body, headers=headers)


def page(client: Any, pathname: str, search: str = "") -> Any:
    return callback(
        client, {"url.pathname": pathname, "url.search": search}, ["page.children", "view.data"]
    )


# -- who is let in


OURS = ["127.0.0.1:8050", "localhost:8050", "[::1]:8050", "127.0.0.1", "LOCALHOST"]
THEIRS = [
    "evil.example",
    "evil.example:8050",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "10.0.0.1",
]
PATHS = ["/", "/_dash-layout", "/_dash-dependencies", "/assets/x.css", "/_dash-component-suites/x.js"]


@pytest.mark.parametrize("host", OURS)
def test_this_machine_is_served_by_its_own_names(app: DashboardApp, host: str) -> None:
    assert client(app).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", THEIRS)
@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_was_bound_to_this_machine_by_others_is_refused(
    app: DashboardApp, host: str, path: str
) -> None:
    answer = client(app).get(path, headers={"Host": host})
    assert answer.status_code == 403
    assert b"Open the address that the terminal printed" in answer.data


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_request_of_another_page_is_refused(app: DashboardApp, headers: dict[str, str]) -> None:
    inputs = {"url.pathname": "/", "url.search": ""}
    answer = callback(client(app), inputs, ["page.children", "view.data"], **headers)
    assert answer.status_code == 403


def test_the_token_is_taken_from_the_address_once_and_kept_in_a_strict_cookie(app: DashboardApp) -> None:
    answer = client(app).get(f"/run/run?token={TOKEN}&from=3&x=%22%3E%3Cscript%3E")
    cookie = answer.headers["Set-Cookie"]
    assert answer.status_code == 200
    assert cookie.startswith(f"diagnose_token_80={TOKEN};")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert "url=/run/run?from=3&amp;x=%22%3E%3Cscript%3E" in answer.text, "it goes on without the token"
    assert TOKEN not in answer.text


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "//\\/evil.example/"])
def test_the_way_on_never_leads_elsewhere(app: DashboardApp, path: str) -> None:
    answer = client(app).get(f"/?token={TOKEN}", environ_overrides={"PATH_INFO": path})
    assert 'url=/evil.example/"' in answer.text


def test_the_way_on_holds_nothing_that_a_browser_leaves_out(app: DashboardApp) -> None:
    answer = client(app).get(f"/?token={TOKEN}", environ_overrides={"PATH_INFO": "/\t/evil.example/"})
    assert 'url=/%09/evil.example/"' in answer.text


def test_a_wrong_token_is_refused_also_where_none_is_needed(app: DashboardApp) -> None:
    assert client(app).get("/?token=wrong").status_code == 401
    assert client(app).get("/?token=").status_code == 401


def test_a_host_that_others_reach_needs_the_token_for_everything(root: Path) -> None:
    app = create_app(root, host="0.0.0.0", token=TOKEN)
    for path in PATHS:
        assert client(app).get(path).status_code == 401, path
        assert client(app, cookie="wrong").get(path).status_code == 401, path
    assert page(client(app), "/").status_code == 401
    by_name = client(app)
    by_name.set_cookie("diagnose_token_80", TOKEN, domain="gpu7")
    assert by_name.get("/", base_url="http://gpu7:80").status_code == 200
    assert page(client(app, cookie=TOKEN), "/").status_code == 200


NEEDS_TOKEN = "Commands need the token: open the address that the terminal printed."


def test_a_command_needs_the_token_and_a_server_of_this_machine_alone(root: Path) -> None:
    for host, cookie, expected in (
        ("127.0.0.1", TOKEN, True),
        ("127.0.0.1", None, False),
        ("127.0.0.1", "wrong", False),
        ("0.0.0.0", TOKEN, False),
    ):
        app = create_app(root, host=host, token=TOKEN)
        with app.server.test_request_context(
            "/",
            headers={"Cookie": f"diagnose_token_80={cookie}"} if cookie else {},
            environ_base={"REMOTE_ADDR": "127.0.0.1"},
        ):
            app.server.preprocess_request()
            said = app.source.command("run", "pause-tuning")
        app.source.close()
        assert said == ("The run has ended." if expected else NEEDS_TOKEN), (host, cookie)


def test_what_is_too_long_for_a_request_is_refused(app: DashboardApp) -> None:
    answer = client(app).post("/_dash-update-component", data=b"{" + b" " * 2_000_000)
    assert answer.status_code in (400, 413, 415)


@pytest.mark.parametrize(
    "host, expected",
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("gpu7", False),
        ("", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    "host", ["[::1", "localhost:x", "localhost:99999999", "\\", "a b", "[", "@", "x@localhost.e"]
)
@pytest.mark.parametrize("origin", ["http://[", "\\", ""])
def test_a_host_that_is_none_is_refused_and_breaks_nothing(
    app: DashboardApp, host: str, origin: str
) -> None:
    headers = {"Host": host, "Origin": origin}
    for answer in (
        client(app).get("/", headers=headers),
        client(app).get(f"/?token={TOKEN}", headers=headers),
        client(app).post("/_dash-update-component", json={}, headers=headers),
    ):
        assert answer.status_code in (400, 403)


# -- what a browser is told


def test_every_answer_bears_the_headers_that_keep_a_page_to_itself(app: DashboardApp) -> None:
    for path in ("/", "/_dash-layout", "/_dash-dependencies", "/nothing/here"):
        headers = client(app).get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        policy = headers["Content-Security-Policy"]
        assert "unsafe-eval" not in policy and "http" not in policy
        assert (
            "script-src 'self' 'sha256-" in policy
            and "'unsafe-inline'" not in policy.partition("style-src")[0]
        )
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY


def test_every_inline_script_may_run_and_no_other(app: DashboardApp) -> None:
    import base64
    import hashlib

    answer = client(app).get("/")
    shown = re.sub(r"<!--.*?-->", "", answer.text, flags=re.DOTALL)
    inline = re.findall(r"<script(?![^>]*(?:src=|application/json))[^>]*>(.*?)</script>", shown, re.DOTALL)
    assert len(inline) >= 2, "Dash's start, and our clientside callbacks"
    for script in inline:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in answer.headers["Content-Security-Policy"], script[:200]


def test_nothing_of_the_page_comes_from_elsewhere(app: DashboardApp) -> None:
    text = client(app).get("/").text + client(app).get("/_dash-layout").text
    assert re.findall(r"""(?:src|href)=["'](?:https?:)?//[^"']+""", text) == []


def test_no_endpoint_for_agents_is_open(app: DashboardApp) -> None:
    rules = [rule.rule for rule in app.server.url_map.iter_rules()]
    assert not [rule for rule in rules if "mcp" in rule]


def test_no_chart_offers_to_upload_itself(app: DashboardApp) -> None:
    found = 0
    for name, each in app.pages.items():
        view = View(page=name, run="run" if each.of_run else None, query={"a": "other", "b": "run"})
        text = json.dumps(each.layout(view, app.source), default=lambda part: part.to_plotly_json())
        for graph in re.findall(r'"type": "Graph"', text):
            found += bool(graph)
        assert text.count('"type": "Graph"') == text.count('"showSendToCloud": false'), name
    assert found > 0


def test_every_page_is_found_at_its_address(app: DashboardApp) -> None:
    for name, each in app.pages.items():
        address = href(name, "run" if each.of_run else None)
        answer = page(client(app), address).get_json()["response"]
        assert answer["view"]["data"]["page"] == name
        assert "Nothing here" not in json.dumps(answer["page"]), address


@pytest.mark.parametrize(
    "address",
    [
        "/no-such-page",
        "/run/no-such-run",
        "/run/../run",
        "/run/run/no-such",
        "/ranks",
        "/run/%00",
        "/run/run/compare",
        f"/run/{HOSTILE}",
        "/run/" + "x" * 5000,
    ],
)
def test_an_address_that_leads_nowhere_is_answered_in_words(app: DashboardApp, address: str) -> None:
    answer = page(client(app), address)
    assert answer.status_code == 200
    assert "Nothing here" in answer.text
    assert answer.get_json()["response"]["view"]["data"]["run"] is None


@pytest.mark.parametrize(
    "view",
    [
        View(page="runs"),
        View(page="run", run="a.b-c_d"),
        View(page="ranks", run="r"),
        View(page="compare", query={"a": "x", "b": "y z&=?#"}),
        View(page="ranks", run="../?#%", query={"from": "3"}),
    ],
)
def test_an_address_leads_back_to_its_view(view: View) -> None:
    path, _, query = href(view.page, view.run, **view.query).partition("?")
    assert view_of(path, f"?{query}") == view


def test_a_server_does_not_tell_which_versions_run(app: DashboardApp) -> None:
    listening = listening_on("127.0.0.1", 0)
    server = server_of(app, listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        connection = http.client.HTTPConnection(*listening.getsockname()[:2], timeout=30)
        connection.request("GET", "/_dash-layout")
        answer = connection.getresponse()
        answer.read()
        connection.close()
    finally:
        server.shutdown()
        server.server_close()
    assert (answer.status, answer.headers["Server"]) == (200, "diagnose")


def test_a_port_that_is_taken_gives_way_to_the_next_and_else_is_an_error() -> None:
    first = listening_on("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(OSError):
        listening_on("127.0.0.1", port)
    with listening_on("127.0.0.1", port, others=20) as second:
        assert port < second.getsockname()[1] <= port + 20
    first.close()
