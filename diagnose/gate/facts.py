"""Counts and settings of a run, other than times, that may explain why another version is slower."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes
from diagnose.gate.cause import FactChange
from diagnose.gate.result import Metric

Value = float | str | None


def _compiler(name: str) -> Callable[[Profile], Value]:
    return lambda profile: getattr(profile.program.compiler, name, None)


def _graph_breaks(profile: Profile) -> Value:
    compiler = profile.program.compiler
    return None if compiler is None else len(compiler.breaks) + len(compiler.skipped)


def _operations(profile: Profile) -> Value:
    graph = profile.program.graph
    return None if graph is None or graph.truncated else graph.total.num_ops


def _first(kind: str, name: str) -> Callable[[Profile], Value]:
    """Of the first of the program's loaders, or models in `DistributedDataParallel`."""

    def value(profile: Profile) -> Value:
        found = next((getattr(each, name) for each in getattr(profile.program, kind)), None)
        return str(found) if isinstance(found, bool) else found

    return value


def _optimizer(profile: Profile) -> Value:
    kinds = [f"{each.kind} ({each.implementation or '?'})" for each in profile.program.optimizers]
    return ", ".join(kinds) or None


def _parameters(profile: Profile) -> Value:
    return sum(model.param_bytes for model in profile.program.models) or None


def _dtypes(profile: Profile) -> Value:
    return ", ".join(sorted({dtype for model in profile.program.models for dtype in model.dtypes})) or None


def _event(kind: str) -> Callable[[Profile], Value]:
    """Per hundred steps: a run of another version may have more of them."""
    return lambda profile: round(100 * profile.events.get(kind, 0) / max(profile.steps.count, 1), 1)


def _per_step(unit: str) -> Callable[[Profile], Value]:
    """Of samples, or tokens."""

    def value(profile: Profile) -> Value:
        per_s, steps_per_s = getattr(profile.throughput, f"{unit}_per_s"), profile.throughput.steps_per_s
        return round(per_s / steps_per_s) if per_s and steps_per_s else None

    return value


FACTS: dict[str, Callable[[Profile], Value]] = {
    "compiled frames": _compiler("num_compilations"),
    "recompilations": _compiler("num_recompilations"),
    "graph breaks": _graph_breaks,
    "operations in a forward pass": _operations,
    "samples per step": _per_step("samples"),
    "loader workers": _first("loaders", "num_workers"),
    "loader batch size": _first("loaders", "batch_size"),
    "loader pin_memory": _first("loaders", "pin_memory"),
    "loader persistent_workers": _first("loaders", "persistent_workers"),
    "optimizer": _optimizer,
    "parameters": _parameters,
    "parameter types": _dtypes,
    "OMP_NUM_THREADS": lambda profile: profile.settings.omp_num_threads,
    "module hooks": lambda profile: profile.settings.num_module_hooks,
    "traced by": lambda profile: profile.settings.trace or "nothing",
    "bytes to the device per step": lambda profile: profile.copies.to_device_bytes,
    "bytes from the device per step": lambda profile: profile.copies.to_host_bytes,
    "DDP find_unused_parameters": _first("ddp", "find_unused_parameters"),
    "DDP backward passes per step": _first("ddp", "passes_per_step"),
    "checkpoints per 100 steps": _event("checkpoint"),
    "garbage collections per 100 steps": _event("gc"),
    "ranks": lambda profile: profile.run.world_size,
}
"""What is looked at, by the name it is reported under. `None` was not measured, and says nothing."""

COUNTED = {
    Metric.SAMPLES_PER_S: "samples",
    Metric.MEAN_SAMPLES_PER_S: "samples",
    Metric.TOKENS_PER_S: "tokens",
}
"""What the metrics that judge work per time count. The others judge a step, however much it holds."""

IN_BYTES = ("parameters", "bytes to the device per step", "bytes from the device per step")

MIN_CHANGE = 0.02
"""A count that moves by less than a fiftieth is the same one, measured at another step."""


def fact_changes(ones: Sequence[Profile], others: Sequence[Profile]) -> tuple[FactChange, ...]:
    """Returns what every run of the second side has otherwise than every run of the first."""
    found = []
    for name, fact in FACTS.items():
        before = [value for value in map(fact, ones) if value is not None]
        after = [value for value in map(fact, others) if value is not None]
        if len(before) == len(ones) and len(after) == len(others) and _differ(before, after):
            found.append(FactChange(name=name, before=_words(name, before), after=_words(name, after)))
    return tuple(found)


def for_same_work(
    ones: Sequence[Profile], others: Sequence[Profile], metric: Metric
) -> tuple[list[Profile], str]:
    """Returns the second side's runs with their times for as much of what the metric counts as the first
    side's steps hold.

    Returns:
        Also how much that is, as `32 samples`; empty where the sides do not differ in it, or the metric
        counts nothing. Half a batch in half the time is no gain in samples/s, and is one in step time.
    """
    unit = COUNTED.get(metric, "")
    before, after = ([_per_step(unit)(run) for run in side] if unit else [] for side in (ones, others))
    known = [[value for value in side if isinstance(value, (int, float))] for side in (before, after)]
    if not all(known) or not min(known[1]) or not _differ(*known):
        return list(others), ""
    amount = statistics.median(known[0])
    ratio = amount / statistics.median(known[1])
    scaled = [
        replace(other, phase_time_ns={phase: ns * ratio for phase, ns in other.phase_time_ns.items()})
        for other in others
    ]
    return scaled, f"{amount:,.0f} {unit}"


def _differ(before: Sequence[Value], after: Sequence[Value]) -> bool:
    numbers = [value for value in (*before, *after) if not isinstance(value, str) and value is not None]
    if len(numbers) < len(before) + len(after):
        return len({*before}) == len({*after}) == 1 and before[0] != after[0]
    one, other = numbers[: len(before)], numbers[len(before) :]
    gap = max(min(other) - max(one), min(one) - max(other))
    return gap > MIN_CHANGE * max(map(abs, numbers))


def _words(name: str, values: Sequence[Value]) -> str:
    """Returns one value, or the range of several."""
    numbers = sorted(value for value in values if not isinstance(value, str) and value is not None)
    if not numbers:
        return str(values[0])
    low, high = (format_bytes(n) if name in IN_BYTES else f"{n:,.6g}" for n in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"
