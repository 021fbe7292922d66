"""However a training script ends, its report comes out, and says how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile
from tests.running import DIAGNOSE, PLAIN, SCRIPTS, Ended, comes_true, finish, only_run, run, start, write

ENDS = SCRIPTS / "ends.py"


def report_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "report.json").read_text())


def block_of(ended: Ended, plain_stderr: str = "") -> list[str]:
    """The lines of the end block, all that may follow the script's own words and a blank line."""
    assert ended.stderr.startswith(plain_stderr + "\ndiagnose: "), ended.stderr
    return ended.stderr[len(plain_stderr) + 1 :].splitlines()


def until_recorded(process: subprocess.Popen[str], folder: Path) -> None:
    """Waits until the script has trained and its steps are in the store, which takes half a second."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == "trained\n":
            break
    assert comes_true(lambda: load_profile(only_run(folder)).steps.count >= 29, within_s=60)


# A step ends when the next one begins or training is over: a script cut short has not ended its last.
WAYS = {
    "returns": (0, "ok", 30, "diagnose: 30 steps, me"),
    "raises": (
        1,
        "script_failed",
        30,
        "diagnose: script failed with ValueError after 30 steps; report covers steps ",
    ),
    "exits with a text": (
        1,
        "script_failed",
        30,
        "diagnose: script exited with code 1 after 30 steps; ",
    ),
    "exits at once": (
        7,
        "script_failed",
        29,
        "diagnose: script exited with code 7 after 29 steps; report ",
    ),
    "crashes": (-11, "script_failed", 29, "diagnose: script ended by SIGSEGV after 29 steps"),
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.extended] * (way != "raises")) for way in WAYS],
)
def test_a_script_that_trained_is_reported_however_it_ends(tmp_path, way):
    code, status, steps, first_line = WAYS[way]
    plain = run(*PLAIN, ENDS, 30, way, cwd=tmp_path)
    ours = run(*DIAGNOSE, "--json", "report.json", ENDS, 30, way, cwd=tmp_path)
    assert plain.code == code
    assert (ours.code, ours.stdout) == (plain.code, plain.stdout), "every loss to its last bit"
    block = block_of(ours, plain.stderr)
    assert block[0].startswith(first_line)
    assert len(block) <= 12
    report = report_of(tmp_path)
    assert report["status"] == status
    assert report["steps"]["count"] == steps
    assert report["run"]["exit_code"] == (code if code >= 0 else None)
    assert report["run"]["signal"] == (-code if code < 0 else None)


@pytest.mark.parametrize(
    "name",
    [
        "SIGKILL",
        pytest.param("SIGTERM", marks=pytest.mark.extended),
        pytest.param("SIGINT", marks=pytest.mark.extended),
    ],
)
def test_a_script_ended_from_outside_is_reported(tmp_path, name):
    number = signal.Signals[name]
    process, _ = start(*DIAGNOSE, "--json", "report.json", ENDS, 30, "waits", cwd=tmp_path)
    until_recorded(process, tmp_path)
    *_, child = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    os.kill(child, number)
    ours = finish(process)
    assert ours.code == -number
    report = report_of(tmp_path)
    assert report["status"] == "script_failed"
    assert (report["run"]["exit_code"], report["run"]["signal"]) == (None, number)
    assert report["steps"]["count"] in (29, 30)
    assert f"diagnose: script ended by {name} after {report['steps']['count']} steps; report" in ours.stderr


def test_what_was_recorded_until_we_were_killed_can_be_reported_later(tmp_path):
    process, _ = start(*DIAGNOSE, ENDS, 30, "waits", cwd=tmp_path)
    until_recorded(process, tmp_path)
    process.kill()
    finish(process)
    later = run(*DIAGNOSE[:-1], "report", "--json", "-", cwd=tmp_path)
    report = json.loads(later.stdout)
    assert report["steps"]["count"] == 29
    assert (report["run"]["exit_code"], report["run"]["signal"]) == (None, None)


def test_a_script_that_never_trains_gets_no_report_made_up(tmp_path):
    write(tmp_path / "job.py", "import time; time.sleep(1.2)")
    ours = run(*DIAGNOSE, "--json", "report.json", "job.py", cwd=tmp_path)
    assert ours.code == 0
    first, second = block_of(ours)[:2]
    assert first.startswith("diagnose: no optimizer step was seen in 1.")
    assert first.endswith(" s; torch was not imported")
    assert second == "  Is this the script that trains, run by the Python that has torch?"
    report = report_of(tmp_path)
    assert report["status"] == "no_steps"
    assert report["phases"] == []
    assert report["steps"]["count"] == 0


def test_a_script_that_imports_torch_and_never_trains_is_told_how_to_mark_steps(tmp_path):
    write(tmp_path / "job.py", "import torch; print(torch.ones(2).sum().item())")
    ours = run(*DIAGNOSE, "--json", "report.json", "job.py", cwd=tmp_path)
    assert (ours.code, ours.stdout) == (0, "2.0\n")
    first, second, third = block_of(ours)[:3]
    assert first.startswith("diagnose: no optimizer step was seen in ")
    assert first.endswith(" s; torch was imported")
    assert second == "  If torch.optim does not drive the steps, mark where each one ends:"
    assert third == "      import diagnose; diagnose.step()"
    assert report_of(tmp_path)["status"] == "no_steps"


@pytest.mark.extended
def test_fewer_than_twenty_steps_give_figures_and_no_verdict(tmp_path):
    ours = run(*DIAGNOSE, "--json", "report.json", "--warmup", "2", ENDS, 12, cwd=tmp_path)
    assert ours.code == 0
    assert block_of(ours)[0].startswith(
        "diagnose: only 10 steps after 2 of warm-up: too few for a verdict, figures only"
    )
    report = report_of(tmp_path)
    assert report["status"] == "too_few_steps"
    assert (report["steps"]["count"], report["steps"]["warmup"]) == (12, 2)


@pytest.fixture(scope="module")
def losses_of_60_steps(tmp_path_factory) -> list[str]:
    return run(*PLAIN, ENDS, 60, cwd=tmp_path_factory.mktemp("plain")).stdout.splitlines()


@pytest.mark.extended
def test_stop_after_ends_the_script_cleanly(tmp_path, losses_of_60_steps):
    ours = run(*DIAGNOSE, "--json", "report.json", "--stop-after", "25", ENDS, 1000, cwd=tmp_path)
    assert ours.code == 0
    assert "Traceback" not in ours.stderr
    losses = ours.stdout.splitlines()
    assert losses == losses_of_60_steps[: len(losses)]
    assert report_of(tmp_path)["steps"]["count"] == 25


@pytest.mark.extended
def test_steps_ends_the_measurement_and_not_the_training(tmp_path, losses_of_60_steps):
    ours = run(*DIAGNOSE, "--json", "report.json", "--steps", "25", ENDS, 60, cwd=tmp_path)
    assert ours.code == 0
    assert ours.stdout.splitlines() == losses_of_60_steps
    assert report_of(tmp_path)["steps"]["count"] == 25
