"""Measuring a process by `attach`, in threads, and when torch is imported late."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diagnose
from diagnose.analysis.profile import load_profile
from diagnose.core.phases import Phase
from diagnose.core.profile import Status
from diagnose.hooks import _imports
from diagnose.hooks._imports import after_import
from diagnose.launch import session, torchrun
from diagnose.report._wording import outcome
from diagnose.rules import diagnosed
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files, read_manifest
from diagnose.store.writer import Writer
from tests.running import finish, run, start, write


def train(steps: int, step_s: float = 0.0) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        time.sleep(step_s)


# -- attach, detach, step


def test_a_script_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folder = diagnose.attach("run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(20, step_s=0.001)
    profile = diagnose.detach()
    assert (folder, profile.steps.count, profile.notes) == (tmp_path / "run", 20, ())


def test_what_happens_between_attach_and_detach_is_measured(tmp_path):
    train(5)
    folder = diagnose.attach(tmp_path / "run")
    train(40, step_s=0.001)
    profile = diagnose.detach()
    train(5)
    assert folder == tmp_path / "run"
    assert read_manifest(folder)["id"] == "run"
    assert (profile.status, profile.steps.count, profile.notes) == (Status.OK, 40, ())
    assert profile.throughput.samples_per_s is not None
    assert sum(profile.share(phase) or 0 for phase in Phase) == pytest.approx(1, abs=1e-6)
    assert profile.overhead.us_per_step is not None
    assert diagnosed(load_profile(folder)) == profile
    assert profile.num_rules, "the rules were asked"


def test_a_process_can_be_measured_again(tmp_path):
    for number in range(3):
        diagnose.attach(tmp_path / str(number))
        train(10 + number)
        assert diagnose.detach().steps.count == 10 + number


def test_a_folder_that_holds_a_detached_run_takes_no_other(tmp_path):
    diagnose.attach(tmp_path / "run")
    train(3)
    assert outcome(diagnose.detach().run) == "detached"
    with pytest.raises(RuntimeError, match=r"run holds an earlier run; name another folder$"):
        diagnose.attach(tmp_path / "run")
    assert not session.is_measured()


TRAINS_AND_STAYS = """
import sys, time, diagnose, torch
folder = diagnose.attach(sys.argv[1])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not list(folder.glob("rank0.sqlite")):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
time.sleep(1)  # it is written to twice a second
print("trained", flush=True)
sys.stdin.read()
"""


@pytest.mark.extended
def test_a_folder_is_joined_while_its_run_goes_on_and_not_when_that_has_crashed(tmp_path, monkeypatch):
    script = write(tmp_path / "stays.py", TRAINS_AND_STAYS)
    process, _ = start(sys.executable, script, tmp_path / "run", cwd=tmp_path, stdin=subprocess.PIPE)
    try:
        monkeypatch.setenv("RANK", "1")
        assert diagnose.attach(tmp_path / "run") == session.leave()
    finally:
        process.kill()
        finish(process)
    assert rank_files(tmp_path / "run") and "ended_unix" not in read_manifest(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"run holds an earlier run; name another folder$"):
        diagnose.attach(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(torchrun, "started_unix", lambda pid: time.time())
    with pytest.raises(RuntimeError, match=r"run holds an earlier run; name another folder$"):
        diagnose.attach(tmp_path / "run")
    monkeypatch.setattr(torchrun, "started_unix", lambda pid: time.time() - 3600)
    assert diagnose.attach(tmp_path / "run") == session.leave(), "the next attempt of the same job"


def test_without_a_folder_the_records_go_to_a_temporary_one():
    folder = diagnose.attach()
    try:
        train(3)
        assert diagnose.detach().run.id == folder.name
        assert rank_files(folder)
    finally:
        shutil.rmtree(folder)


def test_the_warm_up_can_be_given(tmp_path):
    diagnose.attach(tmp_path / "run", warmup=7)
    train(30)
    assert diagnose.detach().steps.warmup == 7


def test_attaching_twice_and_detaching_for_nothing_are_mistakes_of_the_caller(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"^this process is not measured; call diagnose.attach\(\) first$"
    ):
        diagnose.detach()
    diagnose.attach(tmp_path / "run")
    with pytest.raises(
        RuntimeError, match=r"^this process is measured already; call diagnose.detach\(\) first$"
    ):
        diagnose.attach(tmp_path / "other")
    assert diagnose.detach().status is Status.NO_STEPS


def test_marking_steps_does_nothing_in_a_process_that_is_not_measured(monkeypatch, tmp_path):
    diagnose.step()
    monkeypatch.setattr(session, "_session", session.Session(tmp_path / "run"))
    diagnose.step()  # under `diagnose run`, before torch is imported


def test_steps_can_be_marked_by_hand(tmp_path):
    diagnose.attach(tmp_path / "run")
    for _ in range(25):
        diagnose.step()
        elsewhere = threading.Thread(target=diagnose.step)
        elsewhere.start()
        elsewhere.join()
    assert diagnose.detach().steps.count == 24, "the first mark begins the first step"


def test_training_in_a_thread_is_measured_and_the_report_says_what_is_not(tmp_path):
    diagnose.attach(tmp_path / "run")
    thread = threading.Thread(target=train, args=(30,))
    thread.start()
    thread.join()
    profile = diagnose.detach()
    assert profile.steps.count in (29, 30)
    assert profile.where == ()
    assert profile.notes == ("source lines are not sampled: the training loop is not in the main thread",)


def test_an_error_of_our_own_ends_the_measuring_and_not_the_script(tmp_path, monkeypatch, capsys):
    def fail(*args: Any) -> None:
        raise LookupError("a mistake of ours")

    monkeypatch.setattr(Writer, "add_steps", fail)
    diagnose.attach(tmp_path / "run")
    train(10)
    time.sleep(0.7)
    train(10)
    diagnose.detach()
    words = capsys.readouterr().err
    assert words.startswith("diagnose: an error of our own: Traceback (most recent call last):\n")
    assert words.endswith("LookupError: a mistake of ours.\n")


def test_a_folder_that_vanishes_ends_the_measuring_and_not_the_script(tmp_path, capsys):
    folder = diagnose.attach(tmp_path / "run")
    shutil.rmtree(folder)
    train(10)
    diagnose.detach()
    assert capsys.readouterr().err == (
        "diagnose: unable to open database file; records after step 0 are lost.\n"
    ) or not rank_files(folder)


def state_of_the_interpreter(extra: str) -> str:
    return f"""
import gc, json, signal, sys, threading, torch, torch.optim, torch.utils.data
def state():
    return {{
        "meta_path": [str(finder) for finder in sys.meta_path],
        "callbacks": len(gc.callbacks),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "hooks": [len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks)],
        "files": sorted(set(__import__("os").listdir("/proc/self/fd"))) if sys.platform == "linux" else [],
    }}
before = state()
{extra}
print(json.dumps([before, state()]))
"""


def test_detaching_leaves_the_interpreter_as_it_was(tmp_path):
    write(
        tmp_path / "job.py",
        state_of_the_interpreter(
            """
import diagnose
diagnose.attach("run")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in torch.utils.data.DataLoader([torch.ones(2)] * 8, num_workers=1):
    model(rows).sum().backward()
    optimizer.step()
del rows  # which lies in memory shared with the worker
diagnose.detach()
"""
        ),
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert ended.stderr == ""
    before, after = json.loads(ended.stdout)
    after["signals"][-1] = before["signals"][-1]
    sigchld = 16  # torch's own, for the workers
    after["signals"][sigchld] = before["signals"][sigchld]
    assert after == before


@pytest.mark.extended
def test_a_script_that_ends_without_detaching_is_recorded_to_its_end(tmp_path):
    write(
        tmp_path / "job.py",
        """
import diagnose, torch
diagnose.attach("run")
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(30):
    (parameter * 2).sum().backward()
    optimizer.step()
raise SystemExit(3)
""",
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert (ended.code, ended.stdout, ended.stderr) == (3, "", "")
    log = read_rank(tmp_path / "run" / "rank0.sqlite")
    assert len(log.steps) == 30
    assert log.meta["finished"] is True


# -- waiting for an import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that nobody has imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "awaited.py", "import sys\nsys.executed = sys.executed + 1\n")
    monkeypatch.setattr(sys, "executed", 0, raising=False)
    yield path
    sys.modules.pop("awaited", None)
    _imports._waiting.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _imports._finder]


def test_an_action_runs_when_the_module_has_been_executed(module):
    seen: list[int] = []
    after_import("awaited", lambda: seen.append(sys.executed))
    after_import("awaited", lambda: seen.append(sys.executed + 10))
    assert seen == []
    import awaited  # noqa: F401

    assert seen == [1, 11]
    assert _imports._finder not in sys.meta_path, "nothing is awaited any more"
    after_import("awaited", lambda: seen.append(99))
    assert seen == [1, 11, 99], "at once, for it is there"


def test_asking_for_a_module_is_not_importing_it(module):
    seen: list[int] = []
    after_import("awaited", lambda: seen.append(1))
    for _ in range(2):
        assert importlib.util.find_spec("awaited") is not None
    assert seen == []
    import awaited

    assert seen == [1]
    assert "exec_module" not in vars(awaited.__loader__)


def test_a_module_that_fails_at_first_is_awaited_still(module):
    seen: list[int] = []
    module.write_text("import sys\nsys.executed += 1\nassert sys.executed > 1\n")
    after_import("awaited", lambda: seen.append(1))
    with pytest.raises(AssertionError):
        import awaited
    assert seen == []
    import awaited  # noqa: F401

    assert (seen, sys.executed) == ([1], 2)


def test_a_module_that_is_not_there_is_not_there(module):
    after_import("awaited_in_vain", lambda: None)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'awaited_in_vain'$"):
        import awaited_in_vain  # noqa: F401
    assert importlib.util.find_spec("awaited_in_vain") is None


@pytest.mark.extended
def test_a_child_forked_in_the_middle_of_a_flush_can_still_flush(tmp_path):
    write(
        tmp_path / "job.py",
        """
import os, diagnose
from diagnose.launch import flusher

flusher.FLUSH_EVERY_S = 0.0005  # some flush is always under way
diagnose.attach("run")

def train(steps):
    for _ in range(steps):
        sum(range(20_000))
        diagnose.step()

train(200)
for _ in range(20):
    child = os.fork()
    if not child:
        train(5)
        diagnose.detach()
        os._exit(0)
    train(5)
    os.waitpid(child, 0)
print("done")
""",
    )
    ended = run(sys.executable, "job.py", cwd=tmp_path)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
    assert len(rank_files(tmp_path / "run")) == 21
