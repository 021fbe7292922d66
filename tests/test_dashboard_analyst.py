"""The rules, asked by the dashboard in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from diagnose.dashboards import _analyst
from diagnose.dashboards._analyst import Analyst
from diagnose.dashboards._live import Live

from diagnose.analysis.profile import load_profile
from diagnose.core.errors import DiagnoseError
from diagnose.report import to_json
from diagnose.rules import diagnosed
from tests.following import WAIT_S, quickly, until
from tests.recorded import manifest, record
from tests.running import REPOSITORY, comes_true, has_ended


def test_the_analysis_is_the_report_to_the_digit_and_its_process_ends_with_the_server(
    tmp_path: Path,
) -> None:
    record(manifest(tmp_path / "run"), 400)
    analyst = Analyst()
    with quickly():
        live = Live(tmp_path / "run", analyst)
    try:
        snapshot = until(live, lambda now: now.over)
        assert snapshot.profile is not None
        assert to_json(snapshot.profile) == to_json(diagnosed(load_profile(tmp_path / "run")))
        process = analyst._process
        assert process.is_alive()
    finally:
        live.close()
        analyst.close()
    assert not process.is_alive()


def test_an_analysis_that_is_killed_is_said_to_be_and_the_next_one_works(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 50)
    analyst, answers, told = Analyst(), [], threading.Event()

    def take(answer: object) -> None:
        answers.append(answer)
        told.set()

    try:
        analyst.analyse(folder, take)
        assert told.wait(WAIT_S)
        os.kill(analyst._process.pid, signal.SIGKILL)
        for _ in range(2):
            told.clear()
            analyst.analyse(folder, take)
            assert told.wait(WAIT_S)
    finally:
        analyst.close()
    assert str(answers[1]).startswith("the analysis was ended from outside (exit code -9")
    assert answers[2].profile.steps.count == 50  # type: ignore[attr-defined]


SERVER = """
import sys, time
from pathlib import Path
from diagnose.dashboards._analyst import Analyst

if __name__ == "__main__":
    analyst = Analyst()
    analyst.analyse(Path(sys.argv[1]), lambda answer: print(analyst._process.pid, flush=True))
    time.sleep(60)
"""


def test_no_analyst_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    record(manifest(tmp_path / "run"), 50)
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    analyst = int(server.stdout.readline())
    server.kill()
    server.wait()
    server.stdout.close()
    assert has_ended(analyst, within_s=WAIT_S)


def test_a_run_that_would_take_gigabytes_is_not_analysed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = manifest(tmp_path / "run")
    record(folder, 100)
    monkeypatch.setattr(_analyst, "MAX_RECORDS", 99)
    with pytest.raises(DiagnoseError, match="100 steps of all ranks are too many"):
        _analyst.analyse(folder)


def test_an_analyst_that_nobody_asks_lets_its_process_go_and_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_analyst, "IDLE_S", 0.1)
    folder = manifest(tmp_path / "run")
    record(folder, 50)
    analyst, told, processes = Analyst(), threading.Event(), []
    try:
        for _ in range(2):
            told.clear()
            analyst.analyse(folder, lambda answer: told.set())
            assert told.wait(WAIT_S)
            processes.append(analyst._process)
            assert comes_true(lambda: not processes[-1].is_alive())
        assert processes[0] is not processes[1]
    finally:
        analyst.close()
