"""Names of runs: which there may be, and how a run is found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.store.runs import check_name, list_runs, read_manifest, resolve_run
from tests.running import write


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "a b", "a\n", "é", "x" * 129, "\0"]
)
def test_what_is_no_name_of_a_run_is_refused(name):
    with pytest.raises(DiagnoseError, match="cannot name a run"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "0", "2026-11-21_train.py-3", "x" * 128])
def test_a_name_of_letters_digits_and_a_few_signs_is_one(name):
    assert check_name(name) == name


def manifest(root: Path, name: str, text: str) -> Path:
    return write(root / name / "run.json", text).parent


def test_runs_are_listed_newest_first_and_what_is_no_run_is_not(tmp_path):
    manifest(tmp_path, "old", '{"started_unix": 1}')
    manifest(tmp_path, "new", '{"started_unix": 3}')
    manifest(tmp_path, "torn", '{"started_unix": ')
    manifest(tmp_path, "between", '{"started_unix": 2}')
    manifest(tmp_path, "no name", '{"started_unix": 4}')
    (tmp_path / "empty").mkdir()
    assert [path.name for path in list_runs(tmp_path)] == ["new", "between", "old", "torn"]
    assert read_manifest(tmp_path / "torn") == {}
    assert resolve_run(None, tmp_path).name == "new"
    assert resolve_run("old", tmp_path).name == "old"
    assert resolve_run(str(tmp_path / "old"), tmp_path / "elsewhere").name == "old"


@pytest.mark.parametrize(
    "name, message",
    [
        (None, "there are no runs under ROOT.\nRecord one: diagnose run train.py"),
        ("absent", "there is no run 'absent' under ROOT.\nList them: diagnose runs"),
        ("ROOT/absent", "ROOT/absent is not a run: it holds no run.json.\nList them: diagnose runs"),
    ],
)
def test_a_run_that_is_not_there_is_said_to_be_missing_and_where(tmp_path, name, message):
    root = tmp_path / "runs"
    with pytest.raises(DiagnoseError) as error:
        resolve_run(name and name.replace("ROOT", str(root)), root)
    assert str(error.value) == message.replace("ROOT", str(root))
