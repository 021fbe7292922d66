"""A run followed as the dashboard does, quickly, for tests of what it makes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from diagnose.dashboards import _live
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._live import Live
from diagnose.dashboards._server import DashboardApp
from diagnose.dashboards._snapshot import Snapshot

WAIT_S = 30
"""A machine under load takes its time."""


class NoAnalyst(Analyst):
    """Answers at once that it will not: most of these tests are of what needs no rules."""

    def analyse(self, run: Path, told: Callable[..., None], *, urgent: bool = True) -> None:
        told("not asked for")


@contextmanager
def quickly() -> Iterator[None]:
    """Looks fifty times as often."""
    with patch.object(_live, "POLL_S", 0.02), patch.object(_live, "LIVENESS_EVERY_S", 0.02):
        yield


@contextmanager
def followed(folder: Path, analyst: Analyst | None = None) -> Iterator[Live]:
    """Follows a run whose rules nobody asks, or this analyst."""
    with quickly():
        live = Live(folder, analyst or NoAnalyst())
        try:
            yield live
        finally:
            live.close()


def until(live: Live, holds: Callable[[Snapshot], bool]) -> Snapshot:
    """Returns the first snapshot of which this holds."""
    end = time.monotonic() + WAIT_S
    while not holds(snapshot := live.snapshot()):
        if time.monotonic() > end:
            state = f"version {snapshot.version}, {snapshot.words}, {snapshot.num_steps} steps"
            pytest.fail(f"not in {WAIT_S} s: {state}, {snapshot.notes}, {snapshot.analysis}", pytrace=False)
        time.sleep(0.01)
    return snapshot


def tick(app: DashboardApp, page: str, drawn: Any, query: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns what a tick sends to a page, by the names of its parts; nothing where nothing changed."""
    answer = answered(app, page, drawn, query)
    return dict(json.loads(answer)["response"]) if answer else {}


def answered(app: DashboardApp, page: str, drawn: Any, query: dict[str, str] | None = None) -> bytes:
    """Returns a tick as it goes over the wire."""
    (outputs,) = [key for key in app.callback_map if f"{page}-title.children" in key]
    view = {"page": page, "run": "run", "query": query or {}}
    body = {
        "output": outputs,
        "outputs": [
            dict(zip(("id", "property"), name.rsplit(".", 1), strict=True))
            for name in outputs.strip(".").split("...")
        ],
        "inputs": [
            {"id": "tick", "property": "n_intervals", "value": 1},
            {"id": "view", "property": "data", "value": view},
        ],
        "state": [{"id": f"{page}-drawn", "property": "data", "value": drawn}],
        "changedPropIds": ["tick.n_intervals"],
    }
    answer = app.server.test_client().post("/_dash-update-component", json=body)
    assert answer.status_code in (200, 204)
    return bytes(answer.data) if answer.status_code == 200 else b""
