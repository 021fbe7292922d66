"""A script that ends while workers of ours serve it ends at once, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.running import finish, has_ended, run, start, write

SCRIPT = """
import sys
import time
from torch.utils.data import DataLoader
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.persistent_workers import PersistentWorkers
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin

jobs = []
for action, num_workers in ((LoaderWorkers(), 0), (LoaderWorkers(), 1), (PersistentWorkers(), 1)):
    job = Job()
    batches = begin(job, DataLoader(Rows(37, sleep_ms=20), 4, num_workers=num_workers))
    switch = Switch(action, job)
    switch.on(2)
    next(batches)
    jobs.append((switch, batches))
    del batches
pids = [worker.pid for switch, _ in jobs[:2] for worker in switch.prepare(2)[0].workers._workers]
print(*pids, flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.extended),
        pytest.param(
            "import atexit; atexit.register(lambda: [switch.close() for switch, _ in jobs])",
            0,
            marks=pytest.mark.extended,
        ),
        pytest.param("[switch.close() for switch, _ in jobs]", 0, marks=pytest.mark.extended),
    ],
    ids=["as it is", "by an exit", "undone at the exit", "undone before"],
)
def test_a_script_ends_at_once_whether_it_was_undone_or_not(ending: str, code: int, tmp_path: Path) -> None:
    script = write(tmp_path / "ends.py", SCRIPT.format(ending=ending))
    ended = run(sys.executable, script, cwd=tmp_path)
    assert (ended.code, ended.stderr) == (code, "")
    assert all(has_ended(int(pid), within_s=20) for pid in ended.stdout.split())


@pytest.mark.extended
def test_workers_do_not_outlive_a_script_that_is_killed(tmp_path: Path) -> None:
    script = write(tmp_path / "ends.py", SCRIPT.format(ending="time.sleep(600)"))
    process, line = start(sys.executable, script, cwd=tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert all(has_ended(int(pid), within_s=30) for pid in line.split())
