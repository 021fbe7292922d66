"""Why the pairs scatter, as far as the machine tells, and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from diagnose.core.units import format_share
from diagnose.gate.result import Judgement, MeasuredRun, Metric
from diagnose.gate.words import within

CROWDED_SHARE = 0.25
"""Other processes that use this part of a CPU for each CPU of ours disturb."""

STOLEN_SHARE = 0.02
"""A host that takes this part of the CPU time away is seen in step times."""

THROTTLED_SHARE = 0.05

STEADY = (Metric.CPU_MS, Metric.INSTRUCTIONS)
"""Metrics that may tell where the clock cannot."""

BY_THE_CLOCK = (Metric.SAMPLES_PER_S, Metric.TOKENS_PER_S, Metric.MEAN_SAMPLES_PER_S, Metric.STEP_MS)


def causes(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """Names what disturbed the runs; empty where the machine shows nothing."""
    found = []
    machines = [run.machine for run in runs]
    cpus = max((machine.cpus or 0 for machine in machines), default=0)
    foreign = _median(machine.foreign_cpus for machine in machines)
    stolen = _median(machine.stolen_cpus for machine in machines)
    throttled = _median(machine.throttled_share for machine in machines)
    load = _median(machine.load for machine in machines)
    if cpus and foreign is not None and foreign > CROWDED_SHARE * cpus:
        found.append(f"other processes used {foreign:.1f} CPUs where {cpus} were ours to use")
    elif cpus and load is not None and load > 2 * cpus:
        found.append(f"the load average was {load:.1f} on {cpus} CPUs")
    if cpus and stolen is not None and stolen > STOLEN_SHARE * cpus:
        found.append(f"the machine's host gave {stolen:.2f} CPUs to other guests (steal)")
    if throttled is not None and throttled > THROTTLED_SHARE:
        found.append(f"the container's CPU quota was used up in {format_share(throttled)} of its periods")
    return tuple(found)


def advice(found: Sequence[str], metric: Metric, beside: Sequence[Judgement], stopped: str) -> str:
    """Returns what would let the next gate tell."""
    if "step was seen" in stopped:
        return "Steps that torch.optim does not drive are marked with diagnose.step()."
    if "to measure" in stopped:
        return "Let the command train for longer, or leave fewer steps out (--warmup)."
    if "recorded no step" in stopped:
        return "See why that rank ended: what it printed lies beside the runs."
    told = next((each for each in beside if each.metric in STEADY and not each.reason), None)
    if metric in BY_THE_CLOCK and told is not None:
        return (
            f"By {told.metric.label}, which neighbours disturb less, the change is {within(told)}: let "
            f"that decide with --metric {told.metric.value}. It does not see waiting, for disks or a GPU."
        )
    if "budget" in stopped:
        return "Give it more time (--budget), or fewer steps in each run (--steps)."
    if found:
        return "Use a runner with CPUs of its own, fewer jobs at a time, or a larger --max-drop."
    return "The program itself scatters from run to run: fix its seeds, or measure more steps (--steps)."


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
