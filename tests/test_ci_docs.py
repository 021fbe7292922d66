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

from diagnose.gate import fitting, statistics, steps
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
    ended = act(toy, **inputs)
    assert ended.returncode == (1 if slower else 0), ended.stderr
    assert json.loads((toy / "diagnose-gate.json").read_text())["max_drop"] == 0.03


def act(
    folder: Path, *, event: str = "pull_request", before: str = "", **inputs: str
) -> subprocess.CompletedProcess[str]:
    """Runs the action's last step as an event of GitHub's has it."""
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    given = {name: each.get("default", "") for name, each in action["inputs"].items()} | inputs
    known = {f"inputs.{name}": text for name, text in given.items()} | {"github.event.before": before}
    gate = action["runs"]["steps"][-1]
    variables = {
        name: re.sub(r"\$\{\{ (\S+) \}\}", lambda found: known[found[1]], text)
        for name, text in gate["env"].items()
    }
    return shell(gate["run"], folder, GITHUB_EVENT_NAME=event, **variables)


def test_a_command_of_several_lines_is_read_whole(toy: Path) -> None:
    git(toy, "switch", "--quiet", "-c", "several")
    says = "import sys\nassert sys.argv[1:4] == ['--epochs', '1', '--lr'], sys.argv\nsys.argv[1:4] = []\n"
    for _ in range(2):
        commit(toy, says + stand_in(10))
    for command in ("train.py\n--epochs 1\n  --lr\n", "train.py --epochs 1 \\\n  --lr"):
        ended = act(toy, command=command)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.extended
def test_on_a_push_the_action_compares_with_where_the_push_began(toy: Path, tmp_path: Path) -> None:
    """In a clone that is too shallow to hold it, as by fetch-depth: 2."""
    before = git(toy, "rev-parse", "HEAD^1")
    for _ in range(3):  # the slow commit is not the last one of the push
        commit(toy, stand_in(11))
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth", "2", f"file://{toy}", str(clone))
    versions = {}
    for event, began in (("push", before), ("push", "0" * 40), ("pull_request", before)):
        ended = act(clone, event=event, before=began, command="train.py")
        answer = json.loads((clone / "diagnose-gate.json").read_text())
        versions[event, began] = ended.returncode, answer["sides"][0]["commit"]
    parent = git(toy, "rev-parse", "HEAD^1")
    assert versions == {
        ("push", before): (1, before),
        ("push", "0" * 40): (0, parent),
        ("pull_request", before): (0, parent),
    }


def test_no_input_of_the_action_becomes_part_of_its_script() -> None:
    for step in yaml.safe_load(ACTION.read_text(encoding="utf-8"))["runs"]["steps"]:
        assert "${{" not in step["run"]
    assert (ACTION.parent / "../../..").resolve() == REPOSITORY, "what its first step installs"


def test_a_hostile_input_is_only_a_word(toy: Path) -> None:
    hostile = "$(touch pwned)..`touch pwned`"
    ended = act(toy, command="train.py; touch pwned", commits=hostile)
    assert ended.returncode == 2
    act(toy, event="push", before="$(touch pwned)", command="train.py; touch pwned")
    assert not (toy / "pwned").exists()


@pytest.mark.parametrize("merged", [False, True], ids=["of the branch", "of the merged result"])
def test_the_gitlab_example_leaves_the_reports_it_names(toy: Path, merged: bool) -> None:
    """In the second the target branch has become faster meanwhile: the branch began where it was slow."""
    job = example(".gitlab-ci.yml")["speed"]
    target = git(toy, "rev-parse", "HEAD^1")
    variables = {"CI_MERGE_REQUEST_DIFF_BASE_SHA": target, "CI_COMMIT_SHA": git(toy, "rev-parse", "HEAD")}
    if merged:
        slow = git(toy, "rev-parse", "HEAD")
        variables |= {"CI_MERGE_REQUEST_DIFF_BASE_SHA": slow, "CI_MERGE_REQUEST_TARGET_BRANCH_SHA": target}
    ended = shell("\n".join(job["script"]), toy, **variables)
    assert ended.returncode == 1, ended.stderr
    assert ended.returncode not in job["allow_failure"]["exit_codes"]
    reports = job["artifacts"]["reports"]
    assert ElementTree.parse(toy / reports["junit"]).getroot().tag in ("testsuites", "testsuite")
    assert isinstance(json.loads((toy / reports["codequality"]).read_text()), list)


def test_the_jenkins_example_ends_in_the_gates_code(toy: Path, tmp_path: Path) -> None:
    """In a clone of the branch alone, as a multibranch job has it; it is not merged yet."""
    git(toy, "update-ref", "refs/heads/main", "HEAD^1")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--single-branch", "--branch", "change", f"file://{toy}", str(clone))
    scripts = re.findall(r"'''(.*?)'''", blocks("groovy")[0], re.DOTALL)
    codes = [shell(script, clone).returncode for script in scripts]
    assert codes == [0, 1]
    assert (clone / "gate.xml").is_file()


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


def test_the_lengths_of_runs_in_the_text_are_those_of_the_code() -> None:
    text = " ".join(DOCS.split())
    runs = [2 + 2 * count for count in (statistics.MIN_PAIRS, statistics.MAX_PAIRS)]
    assert f"some {runs[0]} to {runs[1]} times" in text
    assert f"at least {fitting.STEPS} steps and at least {fitting.MEASURED_S:g} s" in text
    assert f"after a warm-up of {steps.MIN_WARMUP} steps or more" in text
    assert f"down to {fitting.LEAST_STEPS}, so that {fitting.PLANNED_PAIRS} pairs of runs fit" in text
