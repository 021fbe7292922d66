"""A profiler or tracer is on while the script trains"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Optimizer, Program
from diagnose.core.series import NowAndThen
from diagnose.core.settings import Settings
from diagnose.core.units import format_duration, format_share
from diagnose.rules._cpus import stretch_of
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, loop_lines, lost_of, seen_in, share_of
from diagnose.rules._now_and_then import (
    MEASURED_BOUNDS,
    in_some_steps,
    of_some_steps,
    steps_with,
)
from diagnose.rules._own_code import PROFILER
from diagnose.rules._phases import STEP
from diagnose.rules.base import Rule

MIN_READINGS = 0.5
"""Of a profiler that was never switched off. One with a schedule is on in fewer of the readings."""

FORWARD, BACKWARD, TENSOR, FUSED = 3.0, 7.5, 35.0, 7.5
"""Events that torch's profiler records per node of the graph, forward and backward, and per tensor of an
optimizer, updated one by one or together: counted for linear layers and AdamW with torch 2.13."""

EVENT_NS = 300
"""What one event takes when many follow each other at once."""

IN_STEP = 3.5
"""In a step an event finds its code and data gone from the caches, and writes to memory never used before.
Measured on one thread in steps of 40 linear layers: 0.9 us in the forward pass, 1.1 us in the backward."""

RECORDED = {"record_shapes": 2.5, "with_stack": 1.8, "with_modules": 1.8}
"""So many times more does an event take with these, measured likewise (2.7, 1.6, 1.6 in the backward pass,
more in the forward), and no more with two of them. `profile_memory` costs hardly anything."""

LEAF_NS, TRACED_TENSOR_NS = 8_000, 23_000
"""What `cProfile` adds per module that is called, and per such tensor, likewise."""

GUESS = 0.25
"""What remains to be guessed takes this part of a step of small operations."""

MOST = 0.8

BOUNDS = (0.3, 1.8)

SEEN_BOUNDS = (0.8, 1.5)
"""Likewise where samples found the function at work: Python's call of it is found where it called from."""

STEPPED = "torch/profiler/profiler.py:900 profile.step"
IN_SOME = in_some_steps("profiler", {Phase.FORWARD: 2e6, Phase.OTHER: 10e6})
WIDE = Program(
    graph=Graph(num_nodes=400), optimizers=(Optimizer(kind="AdamW", num_tensors=60, num_elements=1),)
)


class ProfilerLeftOn(Rule):
    """
    ## What it means
    `torch.profiler`, `cProfile`, a debugger or a coverage tool records every operation, or every call, of
    the whole training. That costs time in each, and memory that grows with the steps. Or its schedule has
    no end: it records some of every so many steps, and works its records up each time.

    ## What to do
    Profile a few steps: give `torch.profiler.profile` a schedule, and leave it when that is over.

    ## When it is wrong
    While you are profiling.
    """

    needs = ("host.profiler_share",)
    explains = ("slow-optimizer", "python-overhead")
    spoils = ("small-operators", "step-jitter")
    fires_on = (
        profile(step_ms=20, host=HostStats(profiler_share=1.0), program=WIDE),
        profile(step_ms=20, host=HostStats(profiler_share=1.0)),
        profile(
            step_ms=20,
            host=HostStats(profiler_share=1.0),
            settings=Settings(recorded=("record_shapes", "profile_memory")),
            program=WIDE,
        ),
        profile(
            step_ms=20,
            host=HostStats(profiler_share=0.0),
            settings=Settings(trace="cProfile", num_leaf_modules=100),
        ),
        profile(host=HostStats(profiler_share=0.25), series=IN_SOME),
        profile(
            other_ms=12,
            host=HostStats(profiler_share=0.1),
            series=in_some_steps("profiler", {}),
            where=(replace(at("prof.step()", 0.1), via=STEPPED),),
        ),
        profile(
            host=HostStats(profiler_share=0.0),
            settings=Settings(trace="__main__", trace_function="main"),
            where=(at("path.append(code.co_name)", 0.1, phase=Phase.FORWARD),),
        ),
    )
    silent_on = (
        profile(host=HostStats(profiler_share=0.1)),
        profile(host=HostStats(profiler_share=0.0), program=WIDE),
        profile(host=HostStats(profiler_share=0.25), series=in_some_steps("profiler", {})),
        profile(
            host=HostStats(profiler_share=0.25),
            series=in_some_steps("profiler", {Phase.OTHER: 9e6}, times=1),
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        share, trace = profile.host.profiler_share, profile.settings.trace
        assert share is not None
        found = steps_with("profiler", profile)
        if found is not None:
            return self._in_some_steps(found, profile)
        is_torchs = share >= MIN_READINGS
        if not is_torchs and not trace:
            return None
        lines = () if is_torchs else traced_lines(profile)
        if lines:
            lost, bounds = lost_of(profile, lines), SEEN_BOUNDS
        else:
            costs, bounds = recording_ns(profile) if is_torchs else tracing_ns(profile), BOUNDS
            lost = {phase: min(ns, MOST * profile.spent_ns(phase)) for phase, ns in costs.items()}
        total = sum(lost.values())
        if not total:
            return None
        name = profile.settings.trace_function if lines else trace
        seen = f"Python calls {name} for every call or line of the training thread."
        if is_torchs:
            name = "torch.profiler"
            seen = f"torch's profiler was on in {format_share(share)} of the readings."
        return Finding(
            rule=self.name,
            summary=f"{name} records the whole training",
            lost_ns={phase: ns for phase, ns in lost.items() if ns},
            low_ns=bounds[0] * total,
            high_ns=bounds[1] * total,
            assumption="nothing but what it does itself is dearer for it"
            if lines
            else "an operation is as many events as elsewhere, and each takes as long",
            evidence=(
                seen,
                *map(seen_in, lines[:1]),
                *extras(profile),
                f"It costs about {format_duration(total)} of each step.",
            ),
            fix=f"Record a few steps with {name}, not all of them.",
            code="torch.profiler.profile(schedule=torch.profiler.schedule(wait=10, warmup=2, active=5))"
            if is_torchs
            else "",
            file=lines[0].file if lines else "",
            line=lines[0].line if lines else 0,
        )

    def _in_some_steps(self, found: NowAndThen, profile: Profile) -> Finding | None:
        lines = loop_lines(profile, lambda line: line.via.startswith(PROFILER))
        seen = lost_of(profile, lines) if share_of(lines) else {}
        # To get ready takes the end of the step before.
        lost = {
            phase: max(found.more_ns.get(phase, 0.0), seen.get(phase, 0.0))
            for phase in (*found.more_ns, *seen)
        }
        total_ns = sum(lost.values())
        if not total_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"torch.profiler goes on recording, in {format_share(found.share)} of the steps",
            lost_ns=lost,
            low_ns=MEASURED_BOUNDS[0] * total_ns,
            high_ns=MEASURED_BOUNDS[1] * total_ns,
            assumption="these steps would take as long as the others",
            evidence=(
                *((of_some_steps(found),) if found.more_ns else ()),
                *(f"{seen_in(line)}, in torch's profiler." for line in lines[:1]),
                *extras(profile),
            ),
            fix="Record a few steps once: a schedule without `repeat` begins anew until the script ends.",
            code="torch.profiler.profile(schedule=torch.profiler.schedule(wait=10, warmup=2, active=5,"
            " repeat=1))",
            file=lines[0].file if lines else "",
            line=lines[0].line if lines else 0,
        )


def recording_ns(profile: Profile) -> dict[Phase, float]:
    """Returns what torch's profiler takes of each phase, from what it has to record."""
    graph = profile.program.graph
    more = max((RECORDED.get(name, 1.0) for name in profile.settings.recorded), default=1.0)
    event_ns = IN_STEP * EVENT_NS * more * stretch_of(profile)
    if graph is None or not graph.num_nodes or graph.truncated:
        return {phase: GUESS * profile.spent_ns(phase) for phase in STEP}
    fused = sum(each.num_tensors for each in profile.program.optimizers if each.fused)
    return {
        Phase.FORWARD: event_ns * FORWARD * graph.num_nodes * profile.steps.passes,
        Phase.BACKWARD: event_ns * BACKWARD * graph.num_nodes * profile.steps.passes,
        Phase.OPTIMIZER: event_ns * (TENSOR * looped_tensors(profile) + FUSED * fused),
    }


def extras(profile: Profile) -> tuple[str, ...]:
    """Says what the profiler records besides that makes each event dearer."""
    named = [name for name in profile.settings.recorded if name in RECORDED]
    return (f"It was asked for {' and '.join(named)}, too, which every event pays for.",) if named else ()


def tracing_ns(profile: Profile) -> dict[Phase, float]:
    """Returns what a tracer of Python calls takes of each phase."""
    leaves = profile.settings.num_leaf_modules or 0
    stretch = stretch_of(profile)
    return {
        Phase.FORWARD: stretch * LEAF_NS * leaves,
        Phase.OPTIMIZER: stretch * TRACED_TENSOR_NS * looped_tensors(profile),
        Phase.DATA_WAIT: GUESS * profile.spent_ns(Phase.DATA_WAIT),
    }


def traced_lines(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines of the function that is called for every call or line; none where too few samples
    found it."""
    function = profile.settings.trace_function
    lines = tuple(line for line in profile.where if line.function == function and not line.in_worker)
    return lines if function and share_of(lines) else ()


def looped_tensors(profile: Profile) -> int:
    """Returns the tensors that optimizers update one by one, as far as that is known."""
    return sum(
        optimizer.num_tensors
        for optimizer in profile.program.optimizers
        if optimizer.implementation in ("", "for-loop") and not optimizer.fused
    )
