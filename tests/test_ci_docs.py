"""The examples of docs/ci.md, run as a stranger would who pastes them.

Their shell lines are run letter for letter, in a repository with a slower last commit; only lines that
install something are left out, since they need a network. `diagnose` is the real command, but for the
training: it is a stand-in that says what its steps take.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.gates import commit, git, repository, stand_in
from tests.running import REPOSITORY, environment

yaml = pytest.importorskip("yaml", reason="the examples are YAML")

DOCS = (REPOSITORY / "docs" / "ci.md").read_text(encoding="utf-8")
ACTION = REPOSITORY / ".github" / "actions" / "gate" / "action.yml"
INSTALLS = re.compile(r"^\s*(python3? -m )?(\S*pip3? install|venv|python3 -m venv|\S+/pip install)\b")
DIAGNOSE = """\
#!{python}
import sys
sys.path.insert(0, {repository!r})
from diagnose.gate import measure
from tests.gates import measured_stand_in
measure.measured_run = measured_stand_in  # before any other module takes it from there
from diagnose.cli.main import main
main()
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)


def example(name: str) -> Any:
    (found,) = [block for block in blocks("yaml") if block.startswith(f"# {name}\n")]
    return yaml.safe_load(found)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository whose last commit, a merge as of a pull request, trains slower."""
    top = repository(tmp_path / "toy", stand_in(10))
    git(top, "switch", "--quiet", "--create", "change")
    commit(top, stand_in(11))
    git(top, "switch", "--quiet", "main")
    git(top, "merge", "--quiet", "--no-ff", "--message", "Merge", "change")
    git(top, "update-ref", "refs/remotes/origin/main", "HEAD^1")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "diagnose"
    command.write_text(DIAGNOSE.format(python=sys.executable, repository=str(REPOSITORY)))
    command.chmod(0o755)
    return top


def shell(lines: str, folder: Path, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Runs lines as CI systems do: any that fails ends the rest."""
    kept = "\n".join(line for line in lines.splitlines() if not INSTALLS.match(line))
    path = f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", kept],
        cwd=folder,
        env=environment(**{"GITHUB_ACTIONS": None, "GITHUB_STEP_SUMMARY": None, "PATH": path, **variables}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_no_example_is_left_out() -> None:
    assert [block.splitlines()[0] for block in blocks("yaml")] == [
        "# .github/workflows/speed.yml",
        "# .github/workflows/speed-action.yml",
        "# .gitlab-ci.yml",
    ]
    assert len(blocks("groovy")) == 1
    assert len(blocks("sh")) == 2
    assert len(blocks("python")) == 1


def test_the_github_example_fails_a_slower_pull_request(toy: Path, tmp_path: Path) -> None:
    """In a clone as shallow as the example asks for."""
    job = example(".github/workflows/speed.yml")["jobs"]["gate"]
    (checkout,) = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
    clone = tmp_path / "clone"
    depth = str(checkout["with"]["fetch-depth"])
    git(tmp_path, "clone", "--quiet", "--depth", depth, f"file://{toy}", str(clone))
    (gate,) = [step for step in job["steps"] if "diagnose gate" in step.get("run", "")]
    summary = tmp_path / "summary.md"
    ended = shell(gate["run"], clone, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert ended.returncode == 1, ended.stderr
    assert "\n::error title=diagnose gate::REGRESSION" in ended.stdout
    assert "REGRESSION" in summary.read_text()
    uploaded = next(step for step in job["steps"] if "upload" in step.get("uses", ""))
    for name in uploaded["with"]["path"].split():
        assert (clone / name).is_file()


@pytest.mark.parametrize("slower", [True, False], ids=["slower", "the same"])
def test_the_action_does_what_it_is_told(toy: Path, slower: bool) -> None:
    steps = example(".github/workflows/speed-action.yml")["jobs"]["gate"]["steps"]
    (step,) = [step for step in steps if step.get("uses", "").endswith(".github/actions/gate")]
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    assert set(step["with"]) <= set(action["inputs"])
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()} | step["with"]
    if not slower:
        inputs["commits"] = "HEAD^1..HEAD^1"
    gate = action["runs"]["steps"][-1]
    variables = {name: filled(text, inputs) for name, text in gate["env"].items()}
    ended = shell(gate["run"], toy, **variables)
    assert ended.returncode == (1 if slower else 0), ended.stderr
    assert json.loads((toy / "diagnose-gate.json").read_text())["max_drop"] == 0.03


def filled(text: str, inputs: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda found: inputs[found[1]], text)


def test_no_input_of_the_action_becomes_part_of_its_script() -> None:
    for step in yaml.safe_load(ACTION.read_text(encoding="utf-8"))["runs"]["steps"]:
        assert "${{" not in step["run"]
    assert (ACTION.parent / "../../..").resolve() == REPOSITORY, "what its first step installs"


def test_a_hostile_input_is_only_a_word(toy: Path) -> None:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()}
    inputs |= {"command": "train.py; touch pwned", "commits": "$(touch pwned)..`touch pwned`"}
    gate = action["runs"]["steps"][-1]
    ended = shell(gate["run"], toy, **{name: filled(text, inputs) for name, text in gate["env"].items()})
    assert ended.returncode == 2
    assert not (toy / "pwned").exists()


def test_the_gitlab_example_leaves_the_reports_it_names(toy: Path) -> None:
    job = example(".gitlab-ci.yml")["speed"]
    variables = {
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": git(toy, "rev-parse", "HEAD^1"),
        "CI_COMMIT_SHA": git(toy, "rev-parse", "HEAD"),
    }
    ended = shell("\n".join(job["script"]), toy, **variables)
    assert ended.returncode == 1, ended.stderr
    assert ended.returncode not in job["allow_failure"]["exit_codes"]
    reports = job["artifacts"]["reports"]
    assert ElementTree.parse(toy / reports["junit"]).getroot().tag in ("testsuites", "testsuite")
    assert isinstance(json.loads((toy / reports["codequality"]).read_text()), list)


def test_the_jenkins_example_ends_in_the_gates_code(toy: Path) -> None:
    scripts = re.findall(r"'''(.*?)'''", blocks("groovy")[0], re.DOTALL)
    codes = [shell(script, toy).returncode for script in scripts]
    assert codes == [0, 1]
    assert (toy / "gate.xml").is_file()


def test_a_baseline_is_kept_and_compared_with(toy: Path) -> None:
    update, compare = blocks("sh")
    assert shell(update, toy).returncode == 0
    assert git(toy, "diff", "--cached", "--name-only").startswith(".diagnose/baselines/")
    ended = shell(compare, toy)
    assert ended.returncode == 3, "one job is no history"
    assert "CANNOT TELL" in ended.stdout


COMMANDS = re.findall(r"^    (diagnose (?:gate|bisect) .*)$", DOCS, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_in_the_text_is_one_that_there_is(line: str, toy: Path) -> None:
    git(toy, "tag", "v1.2", "HEAD^1")
    if line.startswith("diagnose gate"):
        line = line.replace("diagnose gate", "diagnose gate --dry-run")
        assert shell(line, toy).returncode == 0
    else:
        ended = shell(line.replace("main --", "nowhere --"), toy)
        assert ended.returncode == 2
        assert "no commit 'nowhere'" in ended.stderr
