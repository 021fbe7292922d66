"""The dashboard's process beside a run, and the verb that serves until it is ended."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recorded import manifest, record
from tests.running import DIAGNOSE, PLAIN, REPOSITORY, environment, run, run_in_terminal, write

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record(manifest(folder / "run", script=HOSTILE, started_unix=2.0), 300)
    record(manifest(folder / "other", started_unix=1.0), 300)
    return folder


LOOKS_AT_ITSELF = """
import os, pathlib, sys, urllib.request
import torch
address = (pathlib.Path(os.environ["DIAGNOSE_RUN"]) / "dashboard.url")
if address.exists():
    print(oct(address.stat().st_mode & 0o777), file=open("seen", "w"))
    url, _, token = address.read_text().strip().partition("?")
    answer = urllib.request.urlopen(url, timeout=60)
    print(url, answer.status, "token" in token, file=open("seen", "a"))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=2):
    optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()
print("trained", model.weight.sum().item() != 0)
sys.exit(7)
"""


def test_a_run_with_a_dashboard_is_the_same_run_and_leaves_no_process(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", LOOKS_AT_ITSELF)
    if sys.version_info >= (3, 11):  # before, `-m` looks into the current folder first whatever it is told
        write(tmp_path / "flask.py", "raise SystemExit('the user has a module of this name')")
    ended = run(*DIAGNOSE, "--dashboard", "--name", "r", script, cwd=tmp_path)
    assert (ended.code, ended.stdout) == (7, "trained True\n")
    lines = ended.stderr.splitlines()
    assert lines[0] == "", "nothing before the report: stderr is no terminal"
    assert lines[-1] == "diagnose: the dashboard is closed; open it again: diagnose dashboard r"
    mode, seen = (tmp_path / "seen").read_text().splitlines()
    url, status, has_token = seen.split()
    assert (mode, status, has_token) == ("0o600", "200", "True")
    assert url.endswith("/run/r")
    folder = tmp_path / ".diagnose" / "runs" / "r"
    assert not (folder / "dashboard.url").exists()
    assert (folder / "dashboard.log").read_text() == ""
    with socket.socket() as gone, pytest.raises(OSError):
        gone.connect(("127.0.0.1", int(url.split(":")[2].split("/")[0])))


WAITS = """
import sys, time
print("training", flush=True)
time.sleep(60)
"""


@pytest.mark.extended
def test_a_run_with_a_dashboard_ends_by_ctrl_c_as_without_and_tells_its_address(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", WAITS)
    ended = run_in_terminal(*DIAGNOSE, "--dashboard", script, cwd=tmp_path, keys={"training": "\x03"})
    plain = run_in_terminal(*PLAIN, script, cwd=tmp_path, keys={"training": "\x03"})
    assert ended.code == plain.code == -signal.SIGINT
    lines = ended.stdout.rstrip().splitlines()
    told = r"diagnose: dashboard at http://127\.0\.0\.1:\d+/run/\S+\?token=\S{32}"
    assert re.fullmatch(told, lines[1])
    assert lines[-1].startswith("diagnose: the dashboard is closed; open it again")


def test_without_a_dashboard_nothing_of_it_is_imported(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "print('no training')")
    done = run(sys.executable, "-X", "importtime", *DIAGNOSE[1:], script, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "diagnose.launch.opened" in imported
    assert imported.isdisjoint({"dash", "flask", "plotly", "pandas", "diagnose.dashboards"})


def test_the_verb_serves_until_it_is_ended(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diagnose", "dashboard", "run", "--run-dir", str(root), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--no-open"], cwd=REPOSITORY, env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.match(r"diagnose: dashboard at http://127\.0\.0\.1:(\d+)(/run/run)\?token=(\S+)  ", line)
    assert found, line
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", found[2])
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    connection.close()


def test_a_run_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    ended = run(sys.executable, "-m", "diagnose", "dashboard", "nosuch", "--no-open", cwd=tmp_path)
    assert ended.code == 2
    assert ended.stderr.startswith("there is no run 'nosuch' under")
