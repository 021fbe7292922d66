"""One run of `attribution_job.py` under `diagnose run`: what was reported, and what was true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attribution_cases import Case

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "attribution_job.py"

WARMUP = 20
TIMEOUT_S = 120

MAX_SHARE_ERROR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run reported and what was true; milliseconds, mean of the measured steps.

    Attributes:
        reported: Reported time of each phase.
        own: The script's own time of each phase.
        injected: What each fault truly took.
        step_ms: The script's own time of a step.
        where: The reported source lines.
        stage_errors: How much too long `fetch` and `collate` were reported per batch, wherever they ran.
        problems: What was wrong with the report as a whole.
    """

    reported: Mapping[str, float]
    own: Mapping[str, float]
    injected: Mapping[str, float]
    step_ms: float
    where: list[dict[str, Any]]
    stage_errors: Mapping[str, float]
    problems: tuple[str, ...]

    def error(self, phase: str) -> float:
        """How much too long the phase was reported."""
        return self.reported.get(phase, 0.0) - self.own.get(phase, 0.0)


def measure(case: Case, *, steps: int) -> Measured:
    """Runs the job under `diagnose run` and reads its report, and what the job itself knows."""
    with tempfile.TemporaryDirectory(prefix="attribution-") as folder:
        report_file, truth_file = Path(folder, "report.json"), Path(folder, "truth.json")
        ours = ["-m", "diagnose", "run", "--quiet", "--warmup", str(WARMUP), "--json", str(report_file)]
        faults = [part for fault in case.faults for part in ("--fault", fault.argument)]
        job = [str(JOB), case.loop, "--steps", str(steps), *faults, "--truth", str(truth_file)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = subprocess.run(
            [sys.executable, *ours, *job],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if ended.returncode:
            raise RuntimeError(f"{case}: the job ended with {ended.returncode}:\n{ended.stderr}")
        if not report_file.exists():
            raise RuntimeError(f"{case}: no report came out:\n{ended.stderr}")
        report = json.loads(report_file.read_text())
        truth = json.loads(truth_file.read_text())
        spent_in_workers = truth_file.with_suffix(".workers")
        logged = spent_in_workers.read_text() if spent_in_workers.exists() else ""

    own, injected = (mean_ms(truth[key][WARMUP:]) for key in ("phases", "faults"))
    injected_in_workers: dict[str, float] = defaultdict(float)
    for line in logged.splitlines():
        place, _, elapsed_ns = line.rpartition(" ")
        injected_in_workers[place] += int(elapsed_ns) / 1e6 / steps
    injected.update(injected_in_workers)
    # The report's stages are of all batches, those of the warm-up included.
    whole = {**mean_ms(truth["phases"]), **mean_ms(truth["faults"]), **injected_in_workers}
    own_stages = {"collate": whole.get("stage: collate", 0.0)}
    own_stages["fetch"] = whole.get("stage: fetch", whole.get("data_wait", 0.0) - own_stages["collate"])
    problems = []
    total = sum(phase["share"] for phase in report["phases"])
    if abs(total - 1) > MAX_SHARE_ERROR:
        problems.append(f"shares sum to {total!r}")
    if report["steps"]["count"] != steps:
        problems.append(f"{report['steps']['count']} steps found of {steps}")
    if report["notes"]:
        problems.append(f"notes: {report['notes']}")
    stages = report["input"]["workers"] or report["input"]
    return Measured(
        reported={phase["name"]: phase["ms_per_step"] for phase in report["phases"]},
        own=own,
        injected=injected,
        step_ms=sum(own.values()),
        where=report["where"],
        stage_errors={
            name: (stages[f"{name}_ns"] or 0.0) / 1e6 - own_ms for name, own_ms in own_stages.items()
        },
        problems=tuple(problems),
    )


def mean_ms(steps: list[dict[str, int]]) -> dict[str, float]:
    """Returns the mean of each key over the steps, in milliseconds; a step without a key took none."""
    keys = {key for step in steps for key in step}
    return {key: sum(step.get(key, 0) for step in steps) / 1e6 / len(steps) for key in keys}
