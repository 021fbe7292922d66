"""How long the runs that count are, by what one run of each version has shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from diagnose.gate.measure import RunPlan
from diagnose.gate.result import MeasuredRun

MEASURED_S = 3.0
"""Each run measures at least so long, however short its steps: a neighbour's burst lasts seconds."""

LEAST_STEPS = 40
"""Steps that a run is never cut below to fit a budget."""

STEPS = 200
"""Steps that a run measures where neither the user nor the length of a step says otherwise."""

PLANNED_PAIRS = 13
"""Pairs that the runs' length is fitted to a budget for: what a machine with some noise needs."""


def fitted(
    plan: RunPlan,
    rehearsals: Sequence[MeasuredRun],
    left_s: float,
    *,
    chooses: bool,
    rounds: int = PLANNED_PAIRS,
) -> RunPlan:
    """Fits the runs that count to what the rehearsals showed: warm-up, length of a step, time left.

    From here on every run measures the same steps, so that both versions see the same data.

    Args:
        plan: That of the rehearsals.
        rehearsals: One run of each version.
        left_s: Time for all further runs; infinite for as long as it takes.
        chooses: Whether the number of their steps is for us to choose.
        rounds: Runs of each version to have time for.
    """
    warmup = max(run.warmup for run in rehearsals)
    steps = plan.steps
    if chooses:
        steps = max(steps, math.ceil(MEASURED_S / min(run.step_s for run in rehearsals)))
        if math.isfinite(left_s):
            startup_s = sum(run.startup_s for run in rehearsals)
            step_s = sum(run.step_s for run in rehearsals)
            affordable = int((left_s / rounds - startup_s) / step_s) - warmup
            steps = max(LEAST_STEPS, min(steps, affordable))
    return replace(plan, steps=steps, warmup=warmup, finds_warmup=False)


def run_s(plan: RunPlan, rehearsals: Sequence[MeasuredRun]) -> float:
    """What a run of the plan takes, of the slower version: its steps, and all that was not steps."""

    def of(run: MeasuredRun) -> float:
        beside_s = max(run.startup_s, run.wall_s - (run.warmup + run.num_steps) * run.step_s)
        return beside_s + (plan.warmup + plan.steps) * run.step_s

    return max(map(of, rehearsals))
