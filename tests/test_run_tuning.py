"""`diagnose run --tune` on a real script: what it keeps, and that the script computes what it did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from diagnose.hooks._recorder import Recorder
from diagnose.launch.tuning import LiveTuning
from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, PLAIN, SCRIPTS, Ended, finish, only_run, run, start, write

pytestmark = pytest.mark.alone

SCRIPT = SCRIPTS / "tunable.py"
EPOCHS = 40
A_FEW = 30
NOTHING_ASKED = {"allow": [], "only": [], "skip": [], "dry_run": True, "apply": ""}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run(*PLAIN, SCRIPT, EPOCHS, cwd=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    options = ("--tune", "--only", "loader-workers", "--json", "report.json", "--name", "tuned")
    return run(*DIAGNOSE, *options, SCRIPT, EPOCHS, cwd=folder), folder


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text(encoding="utf-8")))


def test_a_tuned_run_prints_and_computes_what_the_plain_one_does(plain, tuned):
    ended, _ = tuned
    assert (ended.code, ended.stdout) == (plain.code, plain.stdout)


def test_workers_that_help_are_kept_and_measured_in_pairs(tuned):
    found = report(tuned[1])
    (trial,) = found["trials"]
    assert trial["action"] == "loader-workers"
    assert trial["state"] == "kept", trial
    assert trial["rule"] == "serial-loading"
    assert trial["measured_speedup"] > 1.2
    assert trial["ci"][0] <= trial["measured_speedup"] <= trial["ci"][1]
    confirmation = found["confirmation"]  # none where a slow machine has no time left for it
    assert confirmation is None or confirmation["speedup"] > 1.2


def test_the_end_block_names_what_was_kept_and_the_command_that_reuses_it(tuned):
    ended, _ = tuned
    assert "+ loader-workers=" in ended.stderr
    again = f"diagnose run --apply .diagnose/runs/tuned/tuned.toml {SCRIPT} {EPOCHS}"
    assert ended.stderr.strip().endswith(again)
    block = ended.stderr.strip().splitlines()
    assert len(block) <= 12
    assert max(map(len, block[:-1])) <= 80


def test_the_figures_are_those_of_the_script_left_alone(tuned):
    found = report(tuned[1])
    data_wait = next(phase for phase in found["phases"] if phase["name"] == "data_wait")
    assert data_wait["share"] > 0.6
    assert found["steps"]["count"] == EPOCHS * 64


def test_a_loader_that_the_script_is_done_with_is_not_kept_alive(tmp_path):
    script = """
import gc, weakref, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loaders = []
for _ in range(20):
    loader = DataLoader(TensorDataset(torch.zeros(32, 4)), batch_size=8)
    loaders.append(weakref.ref(loader))
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
gc.collect()
print(sum(loader() is not None for loader in loaders))
"""
    write(tmp_path / "job.py", script)
    assert run(*DIAGNOSE, "--tune", "job.py", cwd=tmp_path).stdout == "1\n"


def test_a_loader_that_only_its_iterator_is_left_of_can_be_worked_on(tmp_path):
    tuning = LiveTuning(Recorder(), tmp_path, NOTHING_ASKED)
    try:
        loader = DataLoader(TensorDataset(torch.zeros(32, 4)), batch_size=8)
        iterator = iter(loader)
        tuning._begins(loader, iterator)
        gone = weakref.ref(loader)
        del loader
        tuning._look()
        assert tuning._job.iterators == [iterator]
        assert tuning._job.loaders == [gone()] and gone() is not None
        tuning._job.loaders, tuning._job.iterators = [], []
        del iterator
        assert gone() is None
    finally:
        tuning.finish()


def test_a_loader_that_holds_its_own_iterator_is_not_kept_alive(tmp_path):
    tuning = LiveTuning(Recorder(), tmp_path, NOTHING_ASKED)
    try:
        loader = DataLoader(TensorDataset(torch.zeros(32, 4)), batch_size=8)
        loader.iterator = iter(loader)
        tuning._begins(loader, loader.iterator)
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
    finally:
        tuning.finish()


@pytest.mark.extended
def test_what_was_kept_is_put_in_force_by_the_next_run_and_confirmed(tuned, tmp_path):
    file = tuned[1] / ".diagnose" / "runs" / "tuned" / "tuned.toml"
    ended = run(*DIAGNOSE, "--apply", file, "--json", "report.json", SCRIPT, A_FEW, cwd=tmp_path)
    assert ended.code == 0
    found = report(tmp_path)
    assert [(trial["action"], trial["state"], trial["pairs"]) for trial in found["trials"]] == [
        ("loader-workers", "kept", 0)
    ]
    assert found["confirmation"]["speedup"] > 1.2


@pytest.mark.extended
def test_a_dry_run_names_the_fix_and_changes_nothing(tmp_path):
    ended = run(*DIAGNOSE, "--dry-run", "--json", "report.json", SCRIPT, A_FEW, cwd=tmp_path)
    assert ended.code == 0
    states = {trial["action"]: trial["state"] for trial in report(tmp_path)["trials"]}
    assert states["loader-workers"] == "not_tried"


def test_ctrl_c_in_a_trial_ends_as_without_us_and_leaves_no_process_behind(tmp_path):
    script = tmp_path / "train.py"
    source = SCRIPT.read_text(encoding="utf-8")
    script.write_text(source.replace("    order = 0\n", "    order = 0\n    print('begun', flush=True)\n"))
    process, _ = start(
        *DIAGNOSE, "--tune", "--only", "loader-workers", script, 1000, cwd=tmp_path, start_new_session=True
    )
    try:
        await_trial(only_run(tmp_path) / "rank0.sqlite")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        ended = finish(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("a process of the run outlived it")
    assert ended.code == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.stderr


def await_trial(path: Path) -> None:
    """Waits until a trial has begun in the run whose file this is."""
    for _ in range(600):
        time.sleep(0.1)
        if path.exists():
            states = [detail["state"] for *_, kind, detail in read_rank(path).events if kind == "tuning"]
            if "trying" in states:
                return
    pytest.fail("no trial began")


@pytest.mark.extended
def test_a_loss_that_goes_wrong_in_a_trial_ends_it_and_the_weights_are_those_of_before(tmp_path):
    options = (
        "--tune",
        "--allow",
        "training",
        "--only",
        "loader-workers-reseeded",
        "--json",
        "report.json",
    )
    ended = run(*DIAGNOSE, *options, SCRIPTS / "spoiled.py", cwd=tmp_path)
    num_wrong, is_finite = ended.stdout.split()
    assert is_finite == "True"
    assert 0 < int(num_wrong) < 100, "the batches that were made ahead are handed out still"
    (trial,) = report(tmp_path)["trials"]
    assert trial["state"] == "harmed"
    assert trial["reason"].startswith("the loss is nan; weights and optimizer state are those of step ")
    assert "harmful, and undone: loader-workers-reseeded" in ended.stderr
