"""Counts and settings of a run, other than times, that may explain why another version is slower."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes
from diagnose.gate.cause import FactChange

Value = float | str | None


def _compiler(name: str) -> Callable[[Profile], Value]:
    return lambda profile: getattr(profile.program.compiler, name, None)


def _graph_breaks(profile: Profile) -> Value:
    compiler = profile.program.compiler
    return None if compiler is None else len(compiler.breaks) + len(compiler.skipped)


def _operations(profile: Profile) -> Value:
    graph = profile.program.graph
    return None if graph is None or graph.truncated else graph.total.num_ops


def _loader(name: str) -> Callable[[Profile], Value]:
    def value(profile: Profile) -> Value:
        found = getattr(profile.program.loaders[0], name) if profile.program.loaders else None
        return str(found) if isinstance(found, bool) else found

    return value


def _optimizer(profile: Profile) -> Value:
    kinds = [f"{each.kind} ({each.implementation or '?'})" for each in profile.program.optimizers]
    return ", ".join(kinds) or None


def _parameters(profile: Profile) -> Value:
    return sum(model.param_bytes for model in profile.program.models) or None


def _dtypes(profile: Profile) -> Value:
    return ", ".join(sorted({dtype for model in profile.program.models for dtype in model.dtypes})) or None


def _ddp(name: str) -> Callable[[Profile], Value]:
    def value(profile: Profile) -> Value:
        found = getattr(profile.program.ddp[0], name) if profile.program.ddp else None
        return str(found) if isinstance(found, bool) else found

    return value


def _event(kind: str) -> Callable[[Profile], Value]:
    """Per hundred steps: a run of another version may have more of them."""
    return lambda profile: round(100 * profile.events.get(kind, 0) / max(profile.steps.count, 1), 1)


def _step_samples(profile: Profile) -> Value:
    rate = profile.throughput
    if not rate.samples_per_s or not rate.steps_per_s:
        return None
    return round(rate.samples_per_s / rate.steps_per_s)


FACTS: dict[str, Callable[[Profile], Value]] = {
    "compiled frames": _compiler("num_compilations"),
    "recompilations": _compiler("num_recompilations"),
    "graph breaks": _graph_breaks,
    "operations in a forward pass": _operations,
    "samples per step": _step_samples,
    "loader workers": _loader("num_workers"),
    "loader batch size": _loader("batch_size"),
    "loader pin_memory": _loader("pin_memory"),
    "loader persistent_workers": _loader("persistent_workers"),
    "optimizer": _optimizer,
    "parameters": _parameters,
    "parameter types": _dtypes,
    "OMP_NUM_THREADS": lambda profile: profile.settings.omp_num_threads,
    "module hooks": lambda profile: profile.settings.num_module_hooks,
    "traced by": lambda profile: profile.settings.trace or "nothing",
    "bytes to the device per step": lambda profile: profile.copies.to_device_bytes,
    "bytes from the device per step": lambda profile: profile.copies.to_host_bytes,
    "DDP find_unused_parameters": _ddp("find_unused_parameters"),
    "DDP backward passes per step": _ddp("passes_per_step"),
    "checkpoints per 100 steps": _event("checkpoint"),
    "garbage collections per 100 steps": _event("gc"),
    "ranks": lambda profile: profile.run.world_size,
}
"""What is looked at, by the name it is reported under. `None` was not measured, and says nothing."""

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


def for_same_samples(
    ones: Sequence[Profile], others: Sequence[Profile]
) -> tuple[list[Profile], float | None]:
    """Returns the second side's runs with their times for as many samples as the first side's steps have.

    Returns:
        Also that number, where the sides differ in it; half a batch in half the time is no gain.
    """
    before = [value for value in map(_step_samples, ones) if isinstance(value, (int, float))]
    after = [value for value in map(_step_samples, others) if isinstance(value, (int, float))]
    if not before or not after or not min(after) or not _differ(before, after):
        return list(others), None
    samples = statistics.median(before)
    ratio = samples / statistics.median(after)
    scaled = [
        replace(other, phase_time_ns={phase: ns * ratio for phase, ns in other.phase_time_ns.items()})
        for other in others
    ]
    return scaled, samples


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
