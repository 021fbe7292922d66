"""Learning by acting: a rollout is no evaluation, an environment's step no batch to prepare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.running import DIAGNOSE, SCRIPTS, run

pytestmark = [pytest.mark.alone, pytest.mark.extended]

SCRIPT = SCRIPTS / "acts.py"
ROWS = SCRIPT.read_text().splitlines()
ENVIRONMENT = [
    *range(1 + ROWS.index("class Corridor:"), 1 + ROWS.index("class ActorCritic(nn.Module):")),
    *(number for number, row in enumerate(ROWS, 1) if "env.step(" in row),
]
"""Lines of the environment, and those that call for a step of it."""

WRONG = {"frequent-evaluation", "slow-batch-building", "python-overhead", "logging-io", "slow-metrics"}


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn"])
def test_the_environment_is_named_and_what_learns_by_acting_is_not_told_to_evaluate_less(
    tmp_path: Path, algorithm: str
):
    command = (*DIAGNOSE, "--quiet", "--json", "report.json", SCRIPT, algorithm)
    ended = run(
        *command, cwd=tmp_path, OMP_NUM_THREADS="1"
    )  # threads of a busy machine wait for each other
    assert ended.code == 0, ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert not WRONG & found.keys(), {name: each["summary"] for name, each in found.items()}
    rollout = found["slow-rollout"]
    assert "the environment" in rollout["summary"]
    assert rollout["line"] in ENVIRONMENT
