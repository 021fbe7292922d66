"""Gating inside a test: the marker, the fixture, and that neither costs anything unless used."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from diagnose.cli._gate import share
from diagnose.gate import pytest_plugin
from tests.gates import commit, git, repository
from tests.running import REPOSITORY, run

PLUGIN = "diagnose.gate.pytest_plugin"
IS_INSTALLED = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
TRAIN = """\
def main():
    print({step_ms})

class Trainer:
    @staticmethod
    def fit():
        main()

if __name__ == "__main__":
    main()
"""
CONFTEST = """\
import os, random, subprocess, sys, zlib
from diagnose.gate import measure
from diagnose.gate.result import MeasuredRun, Metric

step_ms = {{}}

def stand_in(side, name, folder, plan):
    # The gate's own command, in a process of its own, prints what its steps take; once for each version.
    key = (side.root, side.command)
    if key not in step_ms:
        done = subprocess.run(
            [sys.executable, *side.command], cwd=side.root, capture_output=True, text=True,
            env={{**os.environ, "PYTHONPATH": {repository!r}, **side.environment}},
        )
        assert done.returncode == 0, done.stderr
        step_ms[key] = float(done.stdout)
    took = step_ms[key] * random.Random(zlib.crc32(name.encode())).lognormvariate(0, 0.005)
    (folder / name).mkdir(parents=True)
    return MeasuredRun(
        name=name, folder=folder / name, root=side.root, num_steps=plan.steps, warmup=20, step_s=0.01,
        figures={{Metric.SAMPLES_PER_S: 32_000 / took, Metric.STEP_MS: took}},
    )

measure.measured_run = stand_in
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose second commit, on a branch, trains 10 % slower."""
    top = repository(tmp_path / "project", TRAIN.format(step_ms=10))
    git(top, "tag", "same")
    git(top, "switch", "--quiet", "--create", "change")
    (top / "conftest.py").write_text(CONFTEST.format(repository=str(REPOSITORY)))
    commit(top, TRAIN.format(step_ms=11))
    return top


def run_tests(project: Path, test: str, *options: str, **variables: str) -> tuple[int, str]:
    """Runs pytest on one test file, in a process of its own."""
    (project / "test_speed.py").write_text(test)
    plugin = () if IS_INSTALLED else ("-p", PLUGIN)
    usual = ("-q", "-rs", "--strict-markers", *plugin, "-p", "no:cacheprovider", "-p", "no:dash")
    done = run(sys.executable, "-m", "pytest", *usual, *options, cwd=project, **variables)
    return done.code, done.stdout + done.stderr


def test_a_slower_function_fails_its_test_with_the_gates_text(project: Path) -> None:
    code, text = run_tests(
        project,
        """
import pytest
from train import Trainer, main

@pytest.mark.diagnose_gate(base="main", max_drop="3%")
def test_slower(diagnose_gate):
    diagnose_gate(main)

@pytest.mark.diagnose_gate(base="main", max_drop=0.2)
def test_within_what_is_allowed(diagnose_gate):
    assert diagnose_gate(Trainer.fit).judgement.drop > 0.08

@pytest.mark.diagnose_gate(base="HEAD")
def test_a_script_and_after_it_another(diagnose_gate):
    first, second = diagnose_gate("train.py", "--epochs", "1"), diagnose_gate("train.py")
    assert first.verdict.value == second.verdict.value == "pass"
    assert first.folder != second.folder
""",
    )
    assert code == 1, text
    assert "1 failed, 2 passed" in text
    assert "REGRESSION: samples/s is " in text
    assert "diagnose_gate(main)" not in text, "the text is the gate's, without our frames"


def test_the_example_of_the_documentation_runs_and_what_it_cannot_tell_is_skipped(project: Path) -> None:
    documentation = (REPOSITORY / "docs" / "ci.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", documentation, re.MULTILINE | re.DOTALL)
    strictly = """
@pytest.mark.diagnose_gate(baseline=".diagnose/baselines", inconclusive="fail")
def test_strictly(diagnose_gate):
    diagnose_gate("train.py")

@pytest.mark.diagnose_gate(baseline=".diagnose/baselines", inconclusive="pass")
def test_without_a_baseline_nothing_passes(diagnose_gate):
    diagnose_gate("train.py")
"""
    code, text = run_tests(project, example + strictly)
    assert code == 1, text
    assert "2 failed, 2 skipped" in text
    assert "test_training_is_not_slower_than_on_main" in text


@pytest.mark.extended
def test_the_variable_wins_over_the_marker(project: Path) -> None:
    test = "import pytest\n@pytest.mark.diagnose_gate(base='main')\n"
    test += "def test_it(diagnose_gate):\n    diagnose_gate('train.py')\n"
    assert run_tests(project, test)[0] == 1
    code, text = run_tests(project, test, DIAGNOSE_GATE_BASE="HEAD")
    assert code == 0, text


def test_a_branch_that_only_the_remote_has_is_found_there(project: Path) -> None:
    """As in the checkout of a pull request."""
    git(project, "update-ref", "refs/remotes/origin/main", "main")
    git(project, "branch", "--quiet", "-D", "main")
    test = "import pytest\n@pytest.mark.diagnose_gate(base='main')\n"
    test += "def test_it(diagnose_gate):\n    diagnose_gate('train.py')\n"
    code, text = run_tests(project, test)
    assert code == 1, text
    assert "REGRESSION" in text
    assert "origin/main (" in text


def test_a_drop_is_read_as_by_the_command_line() -> None:
    for text in ("3%", "0.03", " 3 %", "20%"):
        assert pytest_plugin._asked({"max_drop": text}).max_drop == share(text)
    assert pytest_plugin._asked({"max_drop": 0.03}).max_drop == 0.03
    for wrong in ("3", "0", "100%", "three", 3):
        with pytest.raises(pytest.fail.Exception, match="max_drop is '3%'"):
            pytest_plugin._asked({"max_drop": wrong})


PACKAGES = {
    "package/__init__.py": "",
    "package/model.py": "STEP_MS = 10\n",
    "package/train.py": "from .model import STEP_MS\ndef main():\n    print(STEP_MS)\n",
    "package/inner/__init__.py": "from .loop import main\n",
    "package/inner/loop.py": "from ..model import STEP_MS\ndef main():\n    print(STEP_MS)\n",
    "jobs/src/other.py": "from .model import STEP_MS\ndef main():\n    print(STEP_MS)\n",
    "jobs/src/model.py": "STEP_MS = 11\n",
    "jobs/token.py": "def main():\n    print(12)\n",
}


@pytest.mark.parametrize(
    "file, module, printed",
    [
        ("package/train.py", "package.train", "10"),
        ("package/inner/__init__.py", "package.inner", "10"),
        ("package/inner/loop.py", "package.inner.loop", "10"),
        ("jobs/src/other.py", "src.other", "11"),
        ("jobs/token.py", "token", "12"),
    ],
)
def test_a_function_is_called_in_its_package(tmp_path: Path, file: str, module: str, printed: str) -> None:
    for path, text in PACKAGES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert pytest_plugin._module(Path(file), module) == module
    done = run(sys.executable, "-m", "diagnose.gate.call", file, module, "main", cwd=tmp_path)
    assert done.stdout.split() == [printed], done.stderr


def test_a_function_of_a_package_is_gated(project: Path) -> None:
    for path, text in PACKAGES.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    commit(project, TRAIN.format(step_ms=11))
    test = "from package.train import main\n"
    test += "def test_it(diagnose_gate):\n    diagnose_gate(main)\n"
    code, text = run_tests(project, test, DIAGNOSE_GATE_BASE="HEAD")
    assert code == 0, text


def test_a_module_that_does_not_agree_with_its_file_is_named_after_it() -> None:
    assert pytest_plugin._module(Path("jobs/train.py"), "__main__") == "train"
    assert pytest_plugin._module(Path("train.py"), "jobs.train") == "train"


def test_a_marked_test_without_the_fixture_is_refused(project: Path) -> None:
    test = "import pytest\n@pytest.mark.diagnose_gate()\ndef test_it():\n    pass\n"
    code, text = run_tests(project, test)
    assert code != 0
    assert "test_it is marked diagnose_gate but does not use the fixture" in text


WRONG = {
    "'3%'": ("'3%'", "pass", "does not take '3%'"),
    "unknown": ("max_drops=3", "pass", "does not take max_drops"),
    "drop": ("base='main', max_drop='3 percent'", "diagnose_gate('train.py')", "is '3%' or 0.03"),
    "metric": ("base='main', metric='speed'", "diagnose_gate('train.py')", "there is no metric 'speed'"),
    "lambda": ("base='main'", "diagnose_gate(lambda: 1)", "<lambda> cannot be called in another process"),
    "builtin": ("base='main'", "diagnose_gate(print)", "print cannot be called in another process"),
    "base": ("base='nowhere'", "diagnose_gate('train.py')", "no commit 'nowhere'"),
    "nothing": ("", "diagnose_gate('train.py')", "say what to compare with: base='main'"),
}


def test_a_wrong_use_is_said_in_words(project: Path) -> None:
    tests = [
        f"@pytest.mark.diagnose_gate({marked})\ndef test_{number}(diagnose_gate):\n    {body}\n"
        for number, (marked, body, _) in enumerate(WRONG.values())
    ]
    code, text = run_tests(project, "import pytest\n" + "\n".join(tests))
    assert code == 1
    assert [words for _, _, words in WRONG.values() if words not in " ".join(text.split())] == []
    assert "passed" not in text


def test_pytest_starts_as_light_as_without_it(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    command = [sys.executable, "-X", "importtime", "-c", f"import pytest, {PLUGIN}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    ours = {name for name in imported if name.partition(".")[0] == "diagnose"}
    assert ours == {"diagnose", "diagnose.gate", PLUGIN}
    assert imported.isdisjoint({"torch", "numpy", "pandas", "dash", "plotly", "typer"})


def test_the_plugin_is_found_where_the_package_is_installed() -> None:
    assert f'\ndiagnose = "{PLUGIN}"\n' in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
