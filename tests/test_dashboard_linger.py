"""A dashboard beside a run stays until the page that is open shows how the run ended."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from diagnose.dashboards import _serving
from diagnose.dashboards._serving import linger
from diagnose.dashboards._source import Source

from diagnose.launch.opened import LINGERS_S
from tests.following import WAIT_S, quickly, until
from tests.recorded import manifest, steps, writer

HERE: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}


def goes_on() -> dict[str, Any]:
    return {"started_unix": time.time(), "ended_unix": None, "exit_code": None}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with quickly(), patch.object(_serving, "SHOWN_S", 0.2):
        made = Source(tmp_path)
        yield made
        made.close()


def test_a_dashboard_that_nobody_looks_at_ends_at_once(source: Source) -> None:
    begun = time.monotonic()
    linger(source)
    assert time.monotonic() - begun < 0.5


def test_an_open_page_is_shown_the_end_before_its_server_goes(source: Source, tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run", **HERE, **goes_on())
    file = writer(folder, **HERE)
    file.add_steps(steps(0, 100))
    file.commit()
    live = source.run("run")
    until(live, lambda now: now.num_steps == 100)

    over: list[bool] = []

    def stay() -> None:
        linger(source)
        over.append(live.snapshot().over)

    with patch.object(_serving, "LINGERS_S", float(WAIT_S)):
        staying = threading.Thread(target=stay)
        staying.start()
        time.sleep(0.5)
        assert staying.is_alive(), "the run goes on"
        file.close()
        manifest(folder, **HERE, exit_code=3)
        staying.join(WAIT_S)
    assert over == [True]


def test_it_does_not_stay_for_long(source: Source, tmp_path: Path) -> None:
    writer(manifest(tmp_path / "run", **HERE, **goes_on()), **HERE).close()
    source.run("run").snapshot()
    begun = time.monotonic()
    with patch.object(_serving, "LINGERS_S", 1.0):
        linger(source)
    assert 0.9 < time.monotonic() - begun < LINGERS_S
