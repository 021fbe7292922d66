"""The callbacks: what they share in this process, and under the real trainers where those are installed."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diagnose
from diagnose.callbacks._training import Training
from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import Status
from diagnose.launch import session
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from tests.running import DIAGNOSE, REPOSITORY, environment, run, write

FOREIGN = REPOSITORY / "benchmarks" / "foreign"


def train(num_steps: int = 30) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.001)


def measured(**wanted: Any) -> Training:
    training = Training(**wanted)
    training.begin(0, 1)
    train(30)
    training.end()
    return training


# -- one training


def test_a_training_is_a_run_with_a_report_in_every_form_asked_for(tmp_path, capsys):
    html, written = tmp_path / "r.html", tmp_path / "r.json"
    training = measured(run_dir=tmp_path / "runs", name="mine", html=html, json=written)
    assert training.folder == tmp_path / "runs" / "mine"
    assert training.profile is not None and training.profile.steps.count == 30
    said = capsys.readouterr()
    assert said.out == "" and "diagnose: 30 steps, me" in said.err
    assert json.loads(written.read_text())["steps"]["count"] == 30
    assert html.read_text().startswith("<!doctype html>")
    assert not session.is_measured()


def test_each_training_is_a_run_of_its_own(tmp_path, capsys):
    training = Training(run_dir=tmp_path, name="mine", quiet=True)
    for count in (25, 35):
        training.begin(0, 1)
        train(count)
        training.end()
        assert training.profile is not None and training.profile.steps.count == count
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2"]
    assert capsys.readouterr().err == ""


def test_a_training_that_never_ended_is_reported_when_the_next_one_begins(tmp_path, capsys):
    training = Training(run_dir=tmp_path)
    training.begin(0, 1)
    train(25)
    training.begin(0, 1)
    assert "diagnose: 25 steps" in capsys.readouterr().err
    training.end()
    assert training.profile is not None and training.profile.status is Status.NO_STEPS


def test_the_project_says_where_to_record_and_the_command_finds_it_there(tmp_path, capsys, monkeypatch):
    write(tmp_path / "pyproject.toml", '[tool.diagnose]\nrun-dir = "kept"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIAGNOSE_DIR", raising=False)
    assert measured(name="mine").folder == tmp_path / "kept" / "mine"
    assert "diagnose report mine --html report.html" in capsys.readouterr().err
    measured(name="mine", run_dir=Path(".diagnose") / "runs")
    assert "diagnose report .diagnose/runs/mine --html report.html" in capsys.readouterr().err


def test_ending_what_never_began_says_nothing(tmp_path, capsys):
    training = Training(run_dir=tmp_path)
    training.end()
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())


def test_a_logger_takes_the_report_instead_of_stderr(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, "mine")
    measured(run_dir=tmp_path, logger=logging.getLogger("mine"))
    assert "diagnose: 30 steps" in caplog.text and "\033[" not in caplog.text
    assert capsys.readouterr().err == ""


def test_a_process_that_is_measured_already_is_left_alone_and_told_so_once(tmp_path, capsys):
    diagnose.attach(tmp_path / "theirs")
    training = Training(run_dir=tmp_path / "ours")
    for _ in range(2):
        training.begin(0, 1)
        training.end()
    train(30)
    assert diagnose.detach().steps.count == 30
    assert capsys.readouterr().err == (
        "diagnose: this process is measured already, by diagnose run or diagnose.attach(); "
        "DiagnoseCallback does nothing.\n"
    )
    assert not (tmp_path / "ours").exists() and training.profile is None


def test_copies_measure_nothing_until_they_are_told(tmp_path):
    training = Training(run_dir=tmp_path, quiet=True)
    training.begin(0, 1)
    for other in (copy.deepcopy(training), pickle.loads(pickle.dumps(training))):
        other.end()
        assert other.profile is None
    train(30)
    training.end()
    assert training.profile is not None and training.profile.steps.count == 30
    assert copy.deepcopy(training).profile == training.profile


def test_a_folder_that_takes_nothing_costs_the_report_and_not_the_training(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    training = measured(run_dir=tmp_path / "file")
    assert training.profile is None and not session.is_measured()
    assert capsys.readouterr().err.startswith("diagnose: this training is not measured, or not reported: ")


def test_a_fault_of_ours_is_told_and_the_training_goes_on(tmp_path, capsys, monkeypatch):
    def fail(*arguments: object) -> None:
        raise LookupError("a mistake of ours")

    monkeypatch.setattr("diagnose.rules.diagnosed", fail)
    measured(run_dir=tmp_path)
    assert capsys.readouterr().err.startswith("diagnose: a bug of ours; the training goes on:\nTraceback")


def test_what_cannot_be_written_is_refused_before_training(tmp_path):
    with pytest.raises(DiagnoseError, match=r"cannot write html .*gone"):
        Training(html=tmp_path / "gone" / "report.html")
    with pytest.raises(DiagnoseError, match="cannot name a run"):
        Training(name="../up")


def test_a_rank_that_nobody_tells_the_folder_records_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    training = Training(run_dir=tmp_path / "runs")
    training.begin(1, 2)
    assert not session.is_measured() and training.folder is None
    training.end()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().err == ""


UNENDED = """
import sys
from pathlib import Path
from diagnose.analysis import profile
from diagnose.callbacks._training import Training
from tests.recorded import record
from tests.test_callbacks import train
profile.FEW_BYTES = 0
training = Training(run_dir=Path(sys.argv[1]), name="mine")
training.begin(0, 1)
for rank in range(1, profile.FEW_RANKS + 2):
    record(training.folder, 30, rank=rank)
train(30)
"""


@pytest.mark.extended
def test_many_ranks_are_reported_also_when_the_interpreter_is_ending(tmp_path):
    ended = run(sys.executable, write(tmp_path / "train.py", UNENDED), tmp_path / "runs", cwd=tmp_path)
    assert ended.code == 0 and "a bug of ours" not in ended.stderr, ended.stderr
    assert "diagnose: 30 steps" in ended.stderr


RANK = """
import os
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from diagnose.callbacks._training import Training
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
training = Training(run_dir=folder / "runs")
if sys.argv[3] == f"rank {rank} is measured":
    import diagnose
    diagnose.attach(folder / f"theirs{rank}")
if sys.argv[3] == "no folder":
    import tempfile
    (folder / "runs").write_text("")
    usual, tempfile.gettempdir = tempfile.gettempdir, lambda: str(folder / "runs")
training.begin(rank, 2)
if sys.argv[3] == "no folder":
    tempfile.gettempdir = usual  # torch wants one, too
assert "RANK" not in os.environ, "a loader of the script's may go by it"
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
training.end()
dist.destroy_process_group()
"""


def of_two_ranks(folder: Path, what: str = "") -> list[str]:
    """Trains on two ranks; returns what each said."""
    script = write(folder / "rank.py", RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), what],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


@pytest.mark.extended
@pytest.mark.parametrize(
    "what, recorded",
    [("rank 0 is measured", []), ("rank 1 is measured", [0])],
)
def test_a_rank_that_is_measured_already_keeps_no_other_waiting(what, recorded, tmp_path):
    of_two_ranks(tmp_path, what)
    folders = list((tmp_path / "runs").glob("*"))
    assert [read_rank(file).meta["rank"] for run in folders for file in rank_files(run)] == recorded


@pytest.mark.extended
def test_a_folder_that_the_first_rank_cannot_make_keeps_no_other_waiting(tmp_path):
    said = of_two_ranks(tmp_path, "no folder")
    assert said[0].startswith("diagnose: this training is not measured, or not reported: ")
    assert said[1] == ""


@pytest.mark.extended
def test_all_ranks_record_into_one_folder_and_the_first_speaks(tmp_path):
    said = of_two_ranks(tmp_path)
    assert "diagnose: 30 steps" in said[0] and said[1] == ""
    [folder] = (tmp_path / "runs").iterdir()
    assert [read_rank(path).meta["rank"] for path in rank_files(folder)] == [0, 1]


# -- the real trainers


@pytest.mark.parametrize(
    "library, script, num_steps",
    [("transformers", "hf_trainer.py", 32), ("lightning", "lightning_trainer.py", 56)],
)
def test_a_real_trainer_is_measured_by_its_callback_or_by_diagnose_run(
    library, script, num_steps, tmp_path
):
    if importlib.util.find_spec(library) is None:  # imported here it would leave torch changed
        pytest.skip(f"{library} is not installed")
    arguments = (FOREIGN / script, "--epochs", "1", "--callback", "runs")
    alone = run(sys.executable, *arguments, cwd=tmp_path)
    assert alone.code == 0, alone.stderr
    [folder] = (tmp_path / "runs").iterdir()
    assert len(read_rank(rank_files(folder)[0]).steps) == num_steps
    under = run(*DIAGNOSE, *arguments, cwd=tmp_path)
    assert f"diagnose: {num_steps} steps" in under.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1, "the callback leaves the measuring to the command"


def test_the_callbacks_need_their_library_alone(tmp_path):
    for name in ("lightning", "pytorch_lightning", "transformers"):
        write(tmp_path / f"{name}.py", f"raise ModuleNotFoundError('none', name={name!r})")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    source = "import diagnose.callbacks.lightning"
    refused = run(sys.executable, "-c", source, cwd=tmp_path, PYTHONPATH=path)
    assert refused.stderr.endswith(
        "ModuleNotFoundError: DiagnoseCallback needs Lightning: pip install lightning\n"
    )
