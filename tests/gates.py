"""What tests of the gate share: toy repositories, a stand-in for a training, the schema of JUnit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from diagnose.gate.bisection import BisectRequest
from diagnose.gate.measure import RunPlan
from diagnose.gate.pairs import Asked
from diagnose.gate.result import Failure, MeasuredRun, Metric, Side, TrainingFailed

STAND_IN = """\
import random, sys, zlib
STEP_MS, SCATTER, EXIT, STALL = {step_ms}, {scatter}, {exit_code}, {stall}
if EXIT:
    print("ValueError: no such file: data.bin", file=sys.stderr)
    sys.exit(EXIT)
usual = STEP_MS * random.Random(zlib.crc32(sys.argv[1].encode())).lognormvariate(0, SCATTER)
print(usual, usual * (1 + STALL))
"""

STEADY, WILD = 0.005, 0.6


def git(folder: Path, *arguments: str) -> str:
    """Runs git as a user without any configuration of their own."""
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def stand_in(step_ms: float, *, scatter: float = STEADY, exit_code: int = 0, stall: float = 0.0) -> str:
    """A script whose steps take so long, scattered from run to run by its name.

    Rare steps that stall add this part to the mean step.
    """
    return STAND_IN.format(step_ms=step_ms, scatter=scatter, exit_code=exit_code, stall=stall)


def commit(folder: Path, script: str, *, path: str = "train.py") -> str:
    """Writes the script and commits it; returns the hash."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(script)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "a change", "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


def repository(folder: Path, *scripts: str) -> Path:
    """A repository with one commit of `train.py` per script, on the branch `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for script in scripts:
        commit(folder, script)
    return folder


def measured_stand_in(side: Side, name: str, folder: Path, plan: RunPlan) -> MeasuredRun:
    """Runs the stand-in, a real process in the real worktree, and makes figures of what it prints."""
    command = [sys.executable, "-S", "-E", *side.command, name]
    done = subprocess.run(command, cwd=side.root, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise TrainingFailed(
            Failure(
                run=name,
                reason=f"{name} ended with exit code {done.returncode}",
                exit_code=done.returncode,
                last_lines=tuple(done.stderr.splitlines()),
            )
        )
    (folder / name).mkdir(parents=True)
    if not done.stdout:  # it did not train
        return MeasuredRun(
            name=name, folder=folder / name, root=side.root, figures={}, num_steps=0, warmup=0,
            step_s=0.0, startup_s=0.1, wall_s=0.1,
        )  # fmt: skip
    step_ms, mean_ms = map(float, done.stdout.split())
    return MeasuredRun(
        name=name,
        folder=folder / name,
        root=side.root,
        figures={
            Metric.SAMPLES_PER_S: 32_000 / step_ms,
            Metric.MEAN_SAMPLES_PER_S: 32_000 / mean_ms,
            Metric.STEP_MS: step_ms,
            Metric.CPU_MS: step_ms,
            Metric.PEAK_MEMORY: 2.0**28,
            Metric.STARTUP: 1.0,
        },
        num_steps=plan.steps,
        warmup=20,
        step_s=step_ms / 1000,
        startup_s=1.0,
        wall_s=0.1,
    )


def scripted(figures: dict[str, float], *, wall_s: float = 1.0, steps: int = 200) -> Any:
    """A measuring function that knows what each side's step takes, and notes the plans it was given."""
    plans: list[RunPlan] = []

    def measure(side: int, name: str, plan: RunPlan) -> MeasuredRun:
        plans.append(plan)
        step_ms = figures[name.partition("-")[0]]
        return MeasuredRun(
            name=name,
            folder=Path(name),
            root=Path(),
            figures={Metric.STEP_MS: step_ms, Metric.STARTUP: 1.0},
            num_steps=steps,
            warmup=30,
            step_s=step_ms / 1000,
            startup_s=1.0,
            wall_s=wall_s,
        )

    measure.plans = plans  # type: ignore[attr-defined]
    return measure


def bisect_request(repository: Path, commits: str, folder: Path) -> BisectRequest:
    """The search among these commits of `train.py` for who lost the time of a usual step."""
    asked = Asked(metric=Metric.STEP_MS, steps=200, warmup=20)
    return BisectRequest(
        asked=asked, commits=commits, command=("train.py",), cwd=repository, folder=folder / "runs"
    )


TESTSUITE = {"name", "tests", "failures", "errors", "time", "skipped"}
IN_TESTCASE = ["skipped", "error", "failure", "system-out"]


def check_junit(text: str) -> ElementTree.Element:
    """Holds the file against the schema that Jenkins publishes (jenkins-junit.xsd), written out."""
    root = ElementTree.fromstring(text)
    assert (root.tag, set(root.attrib)) == ("testsuites", TESTSUITE - {"skipped"})
    (suite,) = root
    assert (suite.tag, set(suite.attrib)) == ("testsuite", TESTSUITE)
    assert [child.tag for child in suite] == ["properties", "testcase"]
    assert all(child.tag == "property" and set(child.attrib) == {"name", "value"} for child in suite[0])
    case = suite[1]
    assert set(case.attrib) == {"classname", "name", "time"}
    places = [IN_TESTCASE.index(child.tag) for child in case]
    assert places == sorted(places)
    allowed = {"skipped": {"message"}, "error": {"message", "type"}, "failure": {"message", "type"}}
    assert all(set(child.attrib) <= allowed.get(child.tag, set()) for child in case)
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.attrib[count]) == len(case.findall(kind))
    return case
