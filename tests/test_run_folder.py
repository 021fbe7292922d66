"""Where `diagnose run` keeps a run, and what it does where it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from diagnose.launch.ending import next_command
from diagnose.launch.opened import Opened
from diagnose.launch.run_folder import create, folder_name, has_room, write_manifest
from diagnose.store.runs import NAME
from tests.running import DIAGNOSE, SCRIPTS, run, write

MOMENT = time.strptime("2026-11-21 02:03:04", "%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    "script, name",
    [
        ("train", "20261121-020304-train"),
        ("my train.v2", "20261121-020304-my-train.v2"),
        ("größe", "20261121-020304-gr-e"),
        ("训练", "20261121-020304-run"),
        ("../..", "20261121-020304-run"),
        ("<img src=x>", "20261121-020304-img-src-x"),
        ("x" * 300, "20261121-020304-" + "x" * 60),
        ("", "20261121-020304-run"),
    ],
)
def test_a_folder_is_named_after_the_time_and_the_safe_letters_of_the_script(script, name):
    assert folder_name(MOMENT, script) == name
    assert NAME.fullmatch(name), "and can be asked for by that name"


def test_a_run_whose_name_is_taken_says_what_it_is_called_instead(tmp_path):
    write(tmp_path / "job.py", "print('hello')")
    first, second = (run(*DIAGNOSE, "--name", "a", "job.py", cwd=tmp_path) for _ in range(2))
    words = "diagnose: there is a run a already; this one is a-2\n"
    assert words not in first.stderr
    assert second.stderr.count(words) == 1


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    assert [create(tmp_path, "a").name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_ranks_share_a_folder(tmp_path):
    assert [create(tmp_path, "a", shared=True).name for _ in range(2)] == ["a", "a"]


def test_runs_stay_out_of_git(tmp_path):
    write(tmp_path / "job.py", "")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    run(*DIAGNOSE, "job.py", cwd=tmp_path)
    status = run("git", "status", "--porcelain", cwd=tmp_path).stdout
    assert status == "?? job.py\n"
    assert (tmp_path / ".diagnose" / ".gitignore").read_text() == "*\n"


def test_a_folder_of_the_users_own_choice_gets_no_gitignore(tmp_path):
    create(tmp_path / "runs", "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "a"]


def test_run_json_says_what_was_run_and_how_it_ended(tmp_path):
    write(tmp_path / "job.py", "raise SystemExit(4)")
    before = time.time()
    run(*DIAGNOSE, "--name", "first", "--warmup", "3", "job.py", "--lr", "ü", cwd=tmp_path)
    facts = json.loads((tmp_path / ".diagnose" / "runs" / "first" / "run.json").read_text())
    assert before < facts.pop("started_unix") <= facts.pop("ended_unix") < time.time()
    assert 0 < facts.pop("startup_s") < 5
    assert facts.pop("started").startswith("20")
    assert facts.pop("pid") > 0
    assert facts == {
        "schema": 1,
        "id": "first",
        "name": "first",
        "script": "job.py",
        "module": False,
        "argv": ["--lr", "ü"],
        "cwd": str(tmp_path),
        "python": DIAGNOSE[0],
        "host": os.uname().nodename,
        "exit_code": 4,
        "signal": None,
        "warmup": 3,
        "ranks": "all",
        "notes": [],
    }


def test_run_dir_says_where_runs_are_kept_also_with_blanks_and_umlauts(tmp_path):
    write(tmp_path / "jöb 1.py", "")
    ours = run(*DIAGNOSE, "--run-dir", "Läufe 2026", "jöb 1.py", cwd=tmp_path)
    (folder,) = (tmp_path / "Läufe 2026").iterdir()
    assert ours.code == 0
    assert f"  next: diagnose report 'Läufe 2026/{folder.name}' --html report.html\n" in ours.stderr
    assert not (tmp_path / ".diagnose").exists()


@pytest.mark.extended
def test_a_run_inside_a_run_is_a_run_of_its_own(tmp_path):
    write(tmp_path / "inner.py", "raise SystemExit(3)")
    command = [*DIAGNOSE, "--name", "inner", "inner.py"]
    write(tmp_path / "outer.py", f"import subprocess; print(subprocess.run({command!r}).returncode)")
    ours = run(*DIAGNOSE, "--name", "outer", "outer.py", cwd=tmp_path)
    assert (ours.code, ours.stdout) == (0, "3\n")
    runs = tmp_path / ".diagnose" / "runs"
    assert {path.name for path in runs.iterdir()} == {"inner", "outer"}
    codes = {path.name: json.loads((path / "run.json").read_text())["exit_code"] for path in runs.iterdir()}
    assert codes == {"inner": 3, "outer": 0}


def test_a_folder_that_cannot_be_written_is_replaced_with_one_clear_line(tmp_path):
    write(tmp_path / "job.py", "import sys; sys.exit('gave up')")
    write(tmp_path / "file", "")
    command = (*DIAGNOSE, "--run-dir", "file/runs", "--name", "a", "job.py")
    ours = run(*command, cwd=tmp_path, TMPDIR=str(tmp_path))
    instead = tmp_path / f"diagnose-{os.getuid()}" / "a"
    assert ours.code == 1
    note = f"file/runs/a could not be written (Not a directory); this run is kept in {instead}."
    assert ours.stderr.startswith(f"gave up\ndiagnose: {note}\n\ndiagnose: script exited with code 1")
    assert json.loads((instead / "run.json").read_text())["notes"] == [note]
    assert oct(instead.parent.stat().st_mode)[-3:] == "700"


def test_a_script_runs_unrecorded_where_nothing_can_be_written(tmp_path):
    write(tmp_path / "job.py", "import os; print('DIAGNOSE_RUN' in os.environ); raise SystemExit(4)")
    write(tmp_path / "file", "")
    taken = write(tmp_path / f"diagnose-{os.getuid()}", "")
    ours = run(
        *DIAGNOSE, "--run-dir", "file/runs", "--name", "a", "job.py", cwd=tmp_path, TMPDIR=str(tmp_path)
    )
    assert (ours.code, ours.stdout) == (4, "False\n")
    assert ours.stderr == (
        "diagnose: file/runs/a could not be written (Not a directory), nor could "
        f"{taken} (File exists); nothing is recorded.\n"
    )


def test_a_full_file_system_is_noticed_before_the_script_starts(tmp_path, full_disk):
    write(tmp_path / "job.py", "raise SystemExit(4)")
    with open(full_disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(bytes(4096))
    ours = run(
        *DIAGNOSE, "--run-dir", full_disk, "--name", "a", "job.py", cwd=tmp_path, TMPDIR=str(tmp_path)
    )
    assert ours.code == 4
    instead = tmp_path / f"diagnose-{os.getuid()}" / "a"
    assert ours.stderr.startswith(
        f"diagnose: {full_disk}/a could not be written (No space left on device); "
        f"this run is kept in {instead}.\n"
    )
    assert [path.name for path in full_disk.iterdir()] == ["ballast"]


@pytest.mark.extended
def test_a_disk_that_fills_up_stops_the_recording_and_not_the_script(tmp_path, full_disk):
    write(
        tmp_path / "job.py",
        f"import sys; sys.argv[1:] = ['4000']\n"
        f"exec(open({str(SCRIPTS / 'ends.py')!r}).read())\n"
        "raise SystemExit(4)\n",
    )
    ours = run(*DIAGNOSE, "--run-dir", full_disk, "--json", "report.json", "job.py", cwd=tmp_path)
    assert ours.code == 4
    assert ours.stdout.endswith("trained\n")
    assert "Traceback" not in ours.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"]["exit_code"] == 4, "run.json was rewritten in place"
    assert re.search("database or disk is full; .* are lost", "".join(report["notes"]))


@pytest.fixture(params=[pytest.param("8k", marks=pytest.mark.extended), "20k"])
def tiny_disk(tmp_path, request):
    """A file system with room for `run.json`, and at most for the beginning of a rank's file."""
    yield from mounted(tmp_path / "disk", request.param)


@pytest.mark.extended
def test_records_that_found_no_room_are_not_called_steps_that_were_not_seen(tmp_path, tiny_disk):
    write(
        tmp_path / "job.py",
        f"import sys; sys.argv[1:] = ['200']\nexec(open({str(SCRIPTS / 'ends.py')!r}).read())\n",
    )
    ours = run(*DIAGNOSE, "--run-dir", tiny_disk, "--json", "report.json", "job.py", cwd=tmp_path)
    assert ours.code == 0
    assert ours.stdout.endswith("trained\n")
    report = json.loads((tmp_path / "report.json").read_text())
    lost = report["run"]["lost"]
    assert lost in (
        "database or disk is full; all records are lost",
        "the disk has no room left; records may be lost",
        "The disk had no room left, not even to say which; records are lost",
    )
    assert "optimizer step" not in ours.stderr
    assert f"diagnose: {lost}" in ours.stderr
    assert "If the disk is full, keep runs where there is room:" in ours.stderr
    assert not [note for note in report["notes"] if "sqlite" in note], "what it left half is taken away"


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 128 KiB."""
    yield from mounted(tmp_path / "disk", "128k")


def mounted(folder, size):
    """Mounts a file system of this size for a test."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_run_json_is_rewritten_in_place_where_there_is_no_room_beside_it(full_disk):
    write_manifest(full_disk, {"exit_code": None})
    with open(full_disk / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(bytes(4096))
    write_manifest(full_disk, {"exit_code": 0})
    assert json.loads((full_disk / "run.json").read_text()) == {"schema": 1, "exit_code": 0}
    assert {path.name for path in full_disk.iterdir()} == {"run.json", "ballast"}


@pytest.mark.extended
def test_a_limit_on_file_size_stops_the_recording_and_not_the_script(tmp_path):
    line = f"ulimit -f 160; {' '.join(DIAGNOSE)} --json report.json {SCRIPTS / 'ends.py'} 600"
    ours = run("bash", "-c", line, cwd=tmp_path)
    assert ours.code == 0
    assert ours.stdout.endswith("trained\n")
    assert "Traceback" not in ours.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"]["exit_code"] == 0
    assert "are lost" in ours.stderr, "the report says what is missing"


@pytest.mark.parametrize(
    "blocks, free, free_to_all, uid, room",
    [(9, 0, 0, 0, False), (9, 4, 0, 0, True), (9, 4, 0, 1000, False), (0, 0, 0, 0, True)],
    ids=["full", "kept back for root", "kept back from others", "not told"],
)
def test_a_disk_is_full_when_nothing_more_can_be_written(
    blocks: int, free: int, free_to_all: int, uid: int, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(f_blocks=blocks, f_bfree=free, f_bavail=free_to_all)
    monkeypatch.setattr(os, "statvfs", lambda folder: told)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert has_room(Path()) is room


def test_the_last_words_name_the_folder_where_the_reading_verbs_look_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIAGNOSE_DIR", raising=False)
    usual, kept = tmp_path / ".diagnose" / "runs" / "a", tmp_path / "kept runs" / "a"

    def commands(folder: Path) -> tuple[str | None, str]:
        return next_command(folder), Opened(address="", process=None, folder=folder).command

    by_name = (None, "diagnose dashboard a")
    assert commands(usual) == by_name
    assert commands(kept) == (
        "diagnose report 'kept runs/a' --html report.html",
        "diagnose dashboard a --run-dir 'kept runs'",
    )
    write(tmp_path / "pyproject.toml", '[tool.diagnose]\nrun-dir = "kept runs"\n')
    assert commands(kept) == by_name
    assert commands(usual) == (
        "diagnose report .diagnose/runs/a --html report.html",
        "diagnose dashboard a --run-dir .diagnose/runs",
    )
