"""Which interpreter a gate's commands run under: the one that was asked for."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import diagnose
from diagnose.core.errors import DiagnoseError
from diagnose.gate.interpreter import split, with_interpreter
from tests.running import REPOSITORY, run

DIAGNOSE = (sys.executable, "-m", "diagnose")
FAILS = "import sys; print('in', sys.prefix, file=sys.stderr); sys.exit(7)"


def environment_in(folder: Path, *paths: object) -> Path:
    """Makes a virtual environment that also sees these folders; returns its interpreter."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "more.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder / "bin" / "python"


def with_ours(folder: Path) -> Path:
    """Makes one that can import all that we can."""
    return environment_in(folder, REPOSITORY, sysconfig.get_paths()["purelib"])


def test_a_bare_python_is_ours() -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    for name in ("python", "python3", f"python{version}", sys.executable):
        assert with_interpreter((name, "-m", "jobs.train")) == ("-m", "jobs.train")
    assert with_interpreter(("train.py", "python")) == ("train.py", "python")
    assert split(("train.py", "-x")) == (sys.executable, ("train.py", "-x"))


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("python2.99", str(tmp_path / "python")):
        with pytest.raises(DiagnoseError, match="there is no interpreter"):
            with_interpreter((name, "train.py"))


def test_an_interpreter_without_diagnose_is_refused_before_anything_runs(tmp_path: Path) -> None:
    bare = environment_in(tmp_path / "bare")
    (tmp_path / "a.py").write_text(FAILS)
    ended = run(*DIAGNOSE, "gate", "--base-cmd", "a.py", "--head-cmd", f"{bare} a.py", cwd=tmp_path)
    assert ended.code == 2
    assert f"diagnose cannot be imported by {bare} (ModuleNotFoundError: " in ended.stderr
    assert f"{bare} -m pip install torch-diagnose=={diagnose.__version__}" in ended.stderr
    assert not (tmp_path / ".diagnose").exists()


def test_another_version_of_diagnose_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "old" / "diagnose" / "cli").mkdir(parents=True)
    (tmp_path / "old" / "diagnose" / "__init__.py").write_text("__version__ = '0.0.1'")
    (tmp_path / "old" / "diagnose" / "cli" / "main.py").touch()
    other = environment_in(tmp_path / "other", tmp_path / "old")
    with pytest.raises(DiagnoseError, match=r"has diagnose 0\.0\.1, and this is"):
        with_interpreter((str(other), "train.py"))


def test_each_side_runs_in_the_environment_that_was_asked_for(tmp_path: Path) -> None:
    one, other = with_ours(tmp_path / "one"), with_ours(tmp_path / "other")
    (tmp_path / "a.py").write_text(FAILS)
    for base, head, prefix in ((one, other, "one"), (other, one, "other")):
        call = ("gate", "--base-cmd", f"{base} a.py", "--head-cmd", f"{head} a.py", "--json", "-")
        ended = run(*DIAGNOSE, *call, cwd=tmp_path)
        assert ended.code == 5, ended.stderr
        answer = json.loads(ended.stdout)
        assert answer["failure"]["last_lines"] == [f"in {tmp_path / prefix}"]
        assert answer["sides"][0]["command"] == [str(base), "a.py"]
        assert not any("the same" in note for note in answer["notes"])


def test_the_same_command_on_both_sides_is_said_to_measure_no_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FAILS)
    call = ("gate", "--base-cmd", "a.py", "--head-cmd", "python a.py", "--json", "-")
    answer = json.loads(run(*DIAGNOSE, *call, cwd=tmp_path).stdout)
    assert answer["notes"] == ["both commands are the same: this measures the machine, not a change"]
