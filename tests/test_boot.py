"""Measuring by the boot folder: a script knows nothing of it, and its children are measured, too."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from tests.running import REPOSITORY, Ended, run, write

BOOT = REPOSITORY / "diagnose" / "launch" / "boot"


# -- the boot folder


def booted(folder: Path, *command: object, path: str = "", **changes: str) -> Ended:
    """Runs Python as `diagnose run` would, recording to `folder/run`."""
    (folder / "run").mkdir(exist_ok=True)
    python_path = os.pathsep.join(filter(None, [str(BOOT), path]))
    return run(
        sys.executable,
        *command,
        cwd=folder,
        PYTHONPATH=python_path,
        DIAGNOSE_RUN=str(folder / "run"),
        **changes,
    )


TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
"""


def test_a_script_knows_nothing_of_the_boot_folder(tmp_path):
    write(tmp_path / "job.py", "import sys; print(sys.path, sys.argv, sys.flags, sorted(sys.warnoptions))")
    plain = run(sys.executable, "job.py", "--lr", "1", cwd=tmp_path, PYTHONPATH=None)
    ours = booted(tmp_path, "job.py", "--lr", "1")
    assert (ours.code, ours.stdout, ours.stderr) == (plain.code, plain.stdout, plain.stderr)


def test_nothing_heavy_is_imported_before_the_script_wants_it(tmp_path):
    write(tmp_path / "job.py", "import sys; print(*sorted(sys.modules))")
    ours = booted(tmp_path, "job.py")
    heavy = {"torch", "numpy", "pandas", "sqlite3", "asyncio", "multiprocessing", "diagnose.hooks.base"}
    assert heavy & set(ours.stdout.split()) == set()
    assert list((tmp_path / "run").iterdir()) == []


def test_the_users_own_sitecustomize_runs_and_is_the_one_that_the_script_sees(tmp_path):
    write(tmp_path / "site" / "sitecustomize.py", "import sys; sys.theirs = __file__; answer = 42")
    write(tmp_path / "job.py", "import sys, sitecustomize as s; print(sys.theirs == s.__file__, s.answer)")
    ended = booted(tmp_path, "job.py", path=str(tmp_path / "site"))
    assert (ended.stdout, ended.stderr) == ("True 42\n", "")


def test_a_sitecustomize_that_fails_fails_as_without_us(tmp_path):
    write(tmp_path / "site" / "sitecustomize.py", "import no_such_module")
    write(tmp_path / "job.py", "print('the script runs')")
    plain = run(sys.executable, "job.py", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    ours = booted(tmp_path, "job.py", path=str(tmp_path / "site"))
    assert plain.stderr
    assert (ours.code, ours.stdout, ours.stderr) == (plain.code, plain.stdout, plain.stderr)


def test_a_failure_of_ours_at_the_start_is_one_line_and_the_script_runs(tmp_path):
    write(tmp_path / "site" / "diagnose" / "__init__.py", "")
    write(tmp_path / "site" / "diagnose" / "launch" / "__init__.py", "")
    write(tmp_path / "site" / "diagnose" / "launch" / "session.py", "raise OSError('broken')")
    write(tmp_path / "job.py", "print('the script runs')")
    ended = booted(tmp_path, "job.py", path=str(tmp_path / "site"))
    assert (ended.code, ended.stdout) == (0, "the script runs\n")
    assert ended.stderr == "diagnose: this process is not measured: OSError('broken')\n"


def test_a_failure_of_ours_when_torch_is_imported_is_one_line_and_the_script_has_its_torch(tmp_path):
    write(
        tmp_path / "job.py",
        "import diagnose.core.plugins\n"
        "def broken(*of): raise OSError('half upgraded')\n"
        "diagnose.core.plugins.discover = broken\n"
        "import torch\nprint(torch.ones(2).sum().item())",
    )
    ended = booted(tmp_path, "job.py")
    assert (ended.code, ended.stdout) == (0, "2.0\n")
    assert ended.stderr == "diagnose: this process is not measured: OSError('half upgraded')\n"


@pytest.mark.extended
def test_a_script_that_asks_first_whether_torch_is_there_is_measured(tmp_path):
    write(
        tmp_path / "job.py",
        f"import importlib.util\nassert importlib.util.find_spec('torch')\n{TRAINS}\ntrain(30)",
    )
    assert booted(tmp_path, "job.py").code == 0
    assert load_profile(tmp_path / "run").steps.count == 30


@pytest.mark.extended
def test_the_environment_says_how_many_steps_to_measure_and_where_to_stop(tmp_path):
    write(tmp_path / "job.py", f"{TRAINS}\ntrain(60)\nprint('done')")
    ended = booted(tmp_path, "job.py", DIAGNOSE_STEPS="25", DIAGNOSE_WARMUP="4")
    assert (ended.code, ended.stdout) == (0, "done\n")
    assert len(read_rank(tmp_path / "run" / "rank0.sqlite").steps) == 25
    shutil.rmtree(tmp_path / "run")
    ended = booted(tmp_path, "job.py", DIAGNOSE_STOP_AFTER="25")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "")
    assert len(read_rank(tmp_path / "run" / "rank0.sqlite").steps) == 25


@pytest.mark.extended
def test_every_hook_is_installed_whenever_its_part_of_torch_comes(tmp_path):
    write(
        tmp_path / "job.py",
        f"""{TRAINS}
import io, safetensors.torch, torch.distributed.checkpoint, torch._dynamo
train(30)
torch.save({{}}, io.BytesIO())
train(10)
""",
    )
    pytest.importorskip("safetensors")
    assert booted(tmp_path, "job.py").code == 0
    profile = load_profile(tmp_path / "run")
    assert profile.notes == ()
    assert profile.events["checkpoint"] == 1


# -- child processes


@pytest.mark.extended
def test_children_that_torch_spawns_are_measured_each_for_itself(tmp_path):
    write(
        tmp_path / "job.py",
        f"""{TRAINS}
import torch.multiprocessing as mp
def work(rank):
    train(30 + rank)
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
    print("done")
""",
    )
    ended = booted(tmp_path, "job.py")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "done\n", "")
    logs = [read_rank(path) for path in rank_files(tmp_path / "run")]
    assert sorted(len(log.steps) for log in logs) == [30, 31]
    assert all(log.meta["finished"] for log in logs), "though they end without atexit"
    assert load_profile(tmp_path / "run").steps.count in (30, 31)


def test_children_that_are_forked_are_measured_each_for_itself(tmp_path):
    write(
        tmp_path / "job.py",
        f"""{TRAINS}
import multiprocessing as mp
torch.set_num_threads(1)
train(21)
children = [mp.get_context("fork").Process(target=train, args=(30 + number,)) for number in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
train(2)
""",
    )
    ended = booted(tmp_path, "job.py")
    assert (ended.code, ended.stderr) == (0, "")
    logs = [read_rank(path) for path in rank_files(tmp_path / "run")]
    assert sorted(len(log.steps) for log in logs) == [23, 30, 31]
    assert all(log.meta["finished"] for log in logs)


@pytest.mark.extended
def test_children_that_do_not_train_leave_nothing(tmp_path):
    write(
        tmp_path / "job.py",
        f"""{TRAINS}
import multiprocessing as mp, subprocess, sys
train(5)
with mp.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
subprocess.run([sys.executable, "-c", "import torch; print(torch.ones(1).item())"], check=True)
train(20)
""",
    )
    ended = booted(tmp_path, "job.py")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "1.0\n[1, 2]\n", "")
    assert [path.name for path in rank_files(tmp_path / "run")] == ["rank0.sqlite"]
