"""`diagnose status`: a run that trains, one that ended, one that was killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diagnose.core.liveness import Liveness, State
from diagnose.report import Terminal, status_json, status_text
from diagnose.store.liveness import liveness
from diagnose.store.writer import Writer
from tests.profiles import FAULTY, NOTHING, assert_lines
from tests.running import DIAGNOSE, comes_true, finish, only_run, run, start, write

STATUS = (sys.executable, "-m", "diagnose", "status")
TRAINS = """
import time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("begins", flush=True)
for _ in range(100_000):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""
WITHIN_S = 30


def recorded(
    folder: Path,
    *,
    meta: dict[str, Any],
    finished: bool = False,
    updated_unix: float | None = None,
    **manifest: Any,
) -> Path:
    """Writes a run of one rank."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": folder.name, "started_unix": 1.0, **manifest}))
    writer = Writer(folder, 0)
    writer.set_meta({**meta, "state": {"finished": finished, "updated_unix": updated_unix or time.time()}})
    writer.close()
    return folder


def dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


HERE = {"host": socket.gethostname()}


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    live = liveness(recorded(tmp_path / "a", meta={**HERE, "pid": os.getpid()}))
    assert live.state is State.RUNNING
    assert live.last_record_s is not None and live.last_record_s < 60


def test_a_run_that_was_closed_or_whose_end_was_noted_has_ended(tmp_path: Path) -> None:
    closed = recorded(tmp_path / "a", finished=True, meta={**HERE, "pid": dead_pid()})
    noted = recorded(tmp_path / "b", meta={**HERE, "pid": os.getpid()}, ended_unix=2.0)
    assert liveness(closed).state is liveness(noted).state is State.ENDED


def test_a_script_that_goes_on_after_training_is_still_running(tmp_path: Path) -> None:
    run_folder = recorded(
        tmp_path / "a", finished=True, meta={**HERE, "pid": dead_pid()}, pid=os.getpid(), **HERE
    )
    assert liveness(run_folder).state is State.RUNNING


def test_a_run_that_was_not_closed_and_whose_process_is_gone_is_gone(tmp_path: Path) -> None:
    assert liveness(recorded(tmp_path / "a", meta={**HERE, "pid": dead_pid()})).state is State.GONE


def test_a_process_that_nobody_has_buried_is_gone_too(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert liveness(recorded(tmp_path / "a", meta={**HERE, "pid": pid})).state is State.GONE
    finally:
        os.waitpid(pid, 0)


def test_a_process_that_only_inherited_the_number_is_not_the_run(tmp_path: Path) -> None:
    run_folder = recorded(tmp_path / "a", meta={**HERE, "pid": os.getpid()}, updated_unix=1.0)
    assert liveness(run_folder).state is State.GONE


def test_a_run_on_another_machine_cannot_be_told(tmp_path: Path) -> None:
    live = liveness(recorded(tmp_path / "a", meta={"host": "node7", "pid": os.getpid()}))
    assert (live.state, live.host) == (State.CANNOT_TELL, "node7")


# -- in words


def test_status_shows_state_figures_and_findings() -> None:
    live = Liveness(state=State.RUNNING, host="here", pid=7, last_record_s=0.41)
    assert_lines(
        status_text(FAULTY, live, Terminal()),
        """
run 20261120-141502-train: running, last record 410 ms ago
  412 steps, median 40.1 ms, 776 samples/s (770-781)
  serial-loading train.py:31                20.0 ms lost, gain 2.0x (1.5 to 2.0)
    The training thread loads its own batches: 50 % of each step
    fix: Give the DataLoader two workers.
         DataLoader(..., num_workers=2, persistent_workers=True)
  slow-updates                           1.00 ms lost, gain 1.02x (1.02 to 1.03)
    The optimizer updates 412 tensors one by one
    fix: Let one call update all tensors: pass foreach=True, or fused=True on a
         GPU, to the SGD in line 4.
""",
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State.ENDED, "ended (ok)"),
        (State.GONE, "no longer running, not closed; last record 12.0 s ago"),
        (State.CANNOT_TELL, "not closed on node7, last record 12.0 s ago"),
    ],
)
def test_status_says_whether_the_run_goes_on(state: State, words: str) -> None:
    live = Liveness(state=state, host="node7", last_record_s=12.0)
    assert status_text(FAULTY, live, Terminal()).splitlines()[0] == f"run {FAULTY.run.id}: {words}"
    assert status_json(FAULTY, live)["live"]["state"] == state.value


def test_status_before_the_first_step_says_so() -> None:
    text = status_text(NOTHING, Liveness(state=State.RUNNING), Terminal())
    assert text.splitlines() == [
        f"run {NOTHING.run.id}: running, no record yet",
        "  no step has ended yet",
    ]


# -- for real


def test_status_follows_a_run_from_its_first_steps_to_its_end(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", TRAINS)
    process, _ = start(*DIAGNOSE, script, cwd=tmp_path)
    try:
        deadline = time.monotonic() + WITHIN_S
        while True:
            shown = json.loads(run(*STATUS, "--json", "-", cwd=tmp_path).stdout)
            if shown["steps"]["count"] or time.monotonic() > deadline:
                break
        assert shown["steps"]["count"] > 0
        assert shown["live"]["state"] == "running"
        assert shown["live"]["last_record_s"] < WITHIN_S
    finally:
        process.send_signal(signal.SIGTERM)
        finish(process)
    ended = run(*STATUS, cwd=tmp_path)
    assert ended.code == 0
    assert ended.stdout.splitlines()[0].endswith(": ended (SIGTERM)")


@pytest.mark.extended
def test_status_of_a_run_killed_with_its_supervisor_says_that_it_is_gone(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", TRAINS)
    process, _ = start(*DIAGNOSE, script, cwd=tmp_path, start_new_session=True)
    assert comes_true(lambda: liveness(only_run(tmp_path)).last_record_s is not None, WITHIN_S)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    # The supervisor is gone by now; its child dies on its own time.
    assert comes_true(lambda: liveness(only_run(tmp_path)).state is State.GONE, WITHIN_S)
    watched = run(*STATUS, "--watch", "0.1", cwd=tmp_path)
    assert watched.code == 0
    assert ": no longer running, not closed; last record " in watched.stdout
