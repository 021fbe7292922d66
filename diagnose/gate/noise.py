"""Why the pairs scatter, as far as the machine tells, and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from diagnose.core.units import format_share
from diagnose.gate.in_turns import KEEPS_FREED
from diagnose.gate.result import Judgement, MeasuredRun, Metric
from diagnose.gate.words import within

CROWDED_SHARE = 0.25
"""Other processes that use this part of a CPU for each CPU of ours disturb."""

STOLEN_SHARE = 0.02
"""A host that takes this part of the CPU time away is seen in step times."""

THROTTLED_SHARE = 0.05

UNLIKE_SHARE = 0.08
"""Runs of which one is in the kernel for so much more of its time than another."""

MANY_FAULTS_PER_S = 5_000
"""So many page faults take about a percent of the time, in a virtual machine."""

KEEP_FREED = " ".join(f"{name}={value}" for name, value in KEEPS_FREED.items())

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
    if _fetches_memory(runs):
        found.append(FETCHES)
    return tuple(found)


FETCHES = (
    "in some runs the C library gives more memory back in each step than in others, and the kernel fetches"
    " it anew"
)


def _fetches_memory(runs: Sequence[MeasuredRun]) -> bool:
    """Whether runs of one version differ in how long page faults keep them in the kernel."""
    for side in ("base", "head"):
        of_side = [run.machine for run in runs if run.name.startswith(side)]
        shares = [m.system_share for m in of_side if (m.minor_faults_per_s or 0.0) > MANY_FAULTS_PER_S]
        known = [share for share in shares if share is not None]
        if len(known) > 1 and max(known) - min(known) > UNLIKE_SHARE:
            return True
    return False


def advice(
    found: Sequence[str],
    metric: Metric,
    beside: Sequence[Judgement],
    stopped: str,
    *,
    may_take_turns: bool = False,
    not_measured: bool = False,
) -> str:
    """Returns what would let the next gate tell.

    Args:
        found: What disturbed the runs.
        metric: What was judged.
        beside: What was judged beside it.
        stopped: Why no further pair was made.
        may_take_turns: Whether both versions could run at once, and have not.
        not_measured: Whether no pair of runs has the metric.
    """
    if not_measured:
        return if_not_measured(metric)
    if "had not ended" in stopped:
        return "See what that run wrote last: it lies beside the runs, as NAME.stderr.txt."
    if "step was seen" in stopped:
        return "Steps that torch.optim does not drive are marked with diagnose.step()."
    if "to measure" in stopped:
        return "Let the command train for longer, or leave fewer steps out (--warmup)."
    if "batch size" in stopped:
        return f"If a step is of as many samples in both versions: --metric {Metric.STEP_MS.value}."
    if "recorded no step" in stopped:
        return "See why that rank ended: what it printed lies beside the runs."
    if may_take_turns and metric in BY_THE_CLOCK and "budget" not in stopped:
        return "Let both versions run at once, in turns of a moment: --in-turns."
    if FETCHES in found:
        return f"Let every run keep what it frees: {KEEP_FREED} diagnose gate ..."
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


NEEDS = {
    Metric.INSTRUCTIONS: "They need a `perf` that can count them, which few containers have. ",
    Metric.PEAK_DEVICE_MEMORY: "It needs a GPU. ",
    Metric.TOKENS_PER_S: "They need batches of whole numbers, as a language model's. ",
}
"""Of metrics that not every job has."""


def if_not_measured(metric: Metric) -> str:
    """Returns what to do where no run has a metric."""
    return f"{NEEDS.get(metric, '')}Choose another one: --metric {Metric.STEP_MS.value}."


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
