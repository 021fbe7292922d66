"""`diagnose run` and torchrun, either started by the other: one run, every rank in it, one report."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from diagnose.launch import torchrun
from diagnose.launch.command import Target
from diagnose.launch.record import Record, open_record
from diagnose.launch.settings import Settings
from diagnose.launch.supervisor import Fate
from diagnose.launch.torchrun import (
    RANKS_LATE_S,
    RanksAtWork,
    place_in_torchrun,
    place_of_node,
    torchrun_arguments,
)
from diagnose.store.runs import rank_files, read_manifest
from tests.running import DIAGNOSE, SCRIPTS, only_run, run, write

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TWO_RANKS = SCRIPTS / "two_ranks.py"


@pytest.fixture
def two() -> list[str]:
    """Options for two ranks on a port that nobody else uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ["--nproc-per-node", "2", "--master-port", str(probe.getsockname()[1])]


@pytest.mark.extended
def test_both_ways_around_train_the_same_weights_and_report_every_rank_once(tmp_path, two):
    plain = run(*TORCHRUN, *two, TWO_RANKS, cwd=tmp_path)
    for folder, command in (
        ("inside", [*DIAGNOSE, *two, "--json", "report.json", TWO_RANKS]),
        ("outside", [*TORCHRUN, *two, "-m", "diagnose", "run", "--json", "report.json", TWO_RANKS]),
    ):
        (tmp_path / folder).mkdir()
        ours = run(*command, cwd=tmp_path / folder)
        assert (ours.code, ours.stdout) == (0, plain.stdout), folder
        assert ours.stderr.startswith(plain.stderr), folder
        assert ours.stderr.count("diagnose: 30 steps, me") == 1, "only rank 0 speaks"
        report = json.loads((tmp_path / folder / "report.json").read_text())
        assert report["run"]["world_size"] == 2
        assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
        assert report["steps"]["count"] == 30
        assert report["notes"] == []
        assert (only_run(tmp_path / folder) / "run.json").is_file()


def test_a_failing_rank_fails_the_job_and_the_report_still_comes_out(tmp_path, two):
    ours = run(*DIAGNOSE, *two, TWO_RANKS, cwd=tmp_path, EXIT_CODE="3")
    assert ours.code == 1, "what torchrun makes of it"
    assert "diagnose: script exited with code 1 after 30 steps" in ours.stderr


FAILS_ONCE = """
import os, sys, time, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(30):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""
"""Without a process group: gloo's own may not come about a second time."""


@pytest.mark.extended
def test_after_a_restart_the_report_is_of_the_ranks_that_were_started_anew(tmp_path, two):
    script = write(tmp_path / "fails_once.py", FAILS_ONCE)
    ours = run(*DIAGNOSE, *two, "--max-restarts", "1", "--json", "report.json", script, cwd=tmp_path)
    assert ours.code == 0, ours.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"]["world_size"] == 2
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["steps"]["count"] == 30
    assert [note for note in report["notes"] if note.startswith("The ranks were restarted")]
    files = [path.name for path in rank_files(only_run(tmp_path))]
    assert files == ["rank0-restart1.sqlite", "rank1-restart1.sqlite"]


def test_options_are_handed_over_as_torchrun_spells_them():
    given = {"nproc_per_node": "2", "standalone": True, "max_restarts": 0, "rdzv_id": None, "tee": None}
    assert torchrun_arguments(given) == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "--max-restarts=0",
    ]


def test_a_single_process_is_not_made_a_torchrun_of_one():
    assert torchrun_arguments({"nproc_per_node": None, "standalone": None, "max_restarts": None}) == []


RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_every_rank_derives_the_same_folder_and_restarts_get_their_own():
    names = [
        place_in_torchrun({**RANK_1, **changes}, "train").folder
        for changes in (
            {"TORCHELASTIC_RUN_ID": "none"},
            {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"},
            {"TORCHELASTIC_RUN_ID": "job7"},
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
        )
    ]
    ends = [name.partition("-train-")[2] for name in names]
    assert ends == ["127.0.0.1-29500"] * 2 + ["job7", "127.0.0.1-29500-restart1"]
    assert len({name.partition("-train-")[0] for name in names}) == 1, (
        "the time at which the parent started"
    )


def test_ranks_of_another_launcher_go_by_the_job_alone():
    """What started them may be a shell, which starts one job after the other."""
    place = place_in_torchrun(RANK_1, "train")
    assert (place.folder, place.late_s) == ("train-127.0.0.1-29500", RANKS_LATE_S)


def test_where_nobody_knows_when_the_parent_began_an_old_folder_of_that_name_is_no_place(monkeypatch):
    """As in a container, of which it is the first process."""
    monkeypatch.setattr("diagnose.launch.torchrun.started_unix", lambda pid: None)
    place = place_in_torchrun({**RANK_1, "TORCHELASTIC_RUN_ID": "job7"}, "train")
    assert (place.folder, place.late_s) == ("train-job7", RANKS_LATE_S)


def test_the_user_names_the_folder_that_several_hosts_share():
    place = place_in_torchrun({**RANK_1, "DIAGNOSE_RUN_DIR": "/shared/run 7"}, "train")
    assert (place.rank, place.path) == (1, Path("/shared/run 7"))


def opened_in(folder: Path) -> Record:
    """The record of one of two hosts that were not told which is the first, and are given a folder."""
    options = {"nnodes": "2", "rdzv_backend": "c10d"}
    place = place_of_node(options, {"DIAGNOSE_RUN_DIR": str(folder)}, "train", is_given=False)
    return open_record(Target(script="train.py"), Settings(), place)


@pytest.mark.parametrize("is_made", [False, True])
def test_where_no_host_knows_its_rank_the_first_to_come_to_the_given_folder_speaks(tmp_path, is_made):
    folder = tmp_path / "given"
    if is_made:
        folder.mkdir()
    records = [opened_in(folder) for _ in range(3)]
    assert [record.folder for record in records] == [folder] * 3
    assert [record.is_first for record in records] == [True, False, False]
    assert read_manifest(folder)["started_unix"] == records[0].facts["started_unix"]


def test_a_given_folder_in_which_a_run_has_ended_is_kept_and_the_next_lies_beside_it(tmp_path, monkeypatch):
    first = opened_in(tmp_path / "given")
    first.end(Fate(exit_code=0))
    second, other = opened_in(tmp_path / "given"), opened_in(tmp_path / "given")
    assert (second.folder, second.is_first) == (tmp_path / "given-2", True)
    assert (other.folder, other.is_first) == (tmp_path / "given-2", False)
    second.end(Fate(exit_code=1))
    assert opened_in(tmp_path / "given").folder == tmp_path / "given-3"


def test_what_ended_since_the_launcher_began_was_an_attempt_of_the_same_job(tmp_path, monkeypatch):
    """Whatever this rank's agent counts: it restarts its ranks for those of other hosts, too."""
    opened_in(tmp_path / "given").end(Fate(exit_code=1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    launched = time.time() - 60
    monkeypatch.setattr(torchrun, "started_unix", lambda pid: launched)
    assert opened_in(tmp_path / "given").folder == tmp_path / "given"
    launched = time.time() - 0.5  # of a clock that is told in whole seconds
    assert opened_in(tmp_path / "given").folder == tmp_path / "given-2", "a later launch"
    opened_in(tmp_path / "given").end(Fate(exit_code=1))
    monkeypatch.setattr(torchrun, "started_unix", lambda pid: None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert opened_in(tmp_path / "given").folder == tmp_path / "given-2", "by its agent's word"
    assert read_manifest(tmp_path / "given")["id"] == "given"


@pytest.mark.extended
def test_ranks_of_torchrun_start_no_torchrun_of_their_own(tmp_path, two):
    script = write(tmp_path / "job.py", "import os; print('rank', os.environ['RANK'], flush=True)")
    write(tmp_path / "pyproject.toml", "[tool.diagnose]\nnproc-per-node = 2\n")
    ours = run(*TORCHRUN, *two, "-m", "diagnose", "run", script, cwd=tmp_path)
    assert ours.code == 0, ours.stderr
    assert sorted(ours.stdout.splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    "environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}]
)
def test_a_job_of_one_process_is_no_place_among_ranks(environ):
    assert place_in_torchrun(environ, "train") is None


def test_rank_0_waits_for_the_others_to_end(tmp_path):
    first, second = RanksAtWork(tmp_path), RanksAtWork(tmp_path)
    threading.Timer(0.3, second.leave).start()
    begun = time.monotonic()
    first.wait_for_others()
    first.leave()
    assert 0.25 < time.monotonic() - begun < 1.5


def test_rank_0_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("diagnose.launch.torchrun.LATE_RANK_S", 0.1)
    first, second = RanksAtWork(tmp_path), RanksAtWork(tmp_path)
    first.wait_for_others()
    first.leave()
    second.leave()
    assert os.listdir(tmp_path) == []
