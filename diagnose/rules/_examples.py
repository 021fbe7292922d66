"""Profiles to write a rule's examples with, in a line each."""

from __future__ import annotations

from typing import Any

from diagnose.core.device import Device
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RunInfo, Status, StepStats
from diagnose.core.units import NS_PER_MS

COMPUTE_MS = {Phase.FORWARD: 30.0, Phase.BACKWARD: 55.0, Phase.OPTIMIZER: 10.0}
"""What a healthy step spends, as parts of what the named phases leave over."""


def profile(
    *, step_ms: float = 100.0, steps: int = 500, device: str | Device = "cpu", **parts: Any
) -> Profile:
    """Returns a profile of a run whose every figure is healthy but those named.

    Args:
        step_ms: Mean time of a step.
        steps: Measured steps.
        device: `cpu` or the accelerator's type, or what a CUDA device says.
        parts: `data_wait_ms=40` gives a phase its time; any other name is a field of `Profile`. What
            no phase names is divided among forward, backward, optimizer and other as in a usual step.

    Raises:
        ValueError: If the named phases take more than the step.
    """
    times = dict.fromkeys(Phase, 0.0)
    named = {f"{phase.value}_ms": phase for phase in Phase}
    for name in [name for name in parts if name in named]:
        times[named[name]] = float(parts.pop(name))
    rest = step_ms - sum(times.values())
    if rest < -1e-9:
        raise ValueError(f"the phases take {sum(times.values())} ms, more than the step of {step_ms} ms")
    shares = {phase: share for phase, share in COMPUTE_MS.items() if not times[phase]}
    for phase, share in shares.items():
        times[phase] += rest * share / 100
    times[Phase.OTHER] += step_ms - sum(times.values())
    step_ns = step_ms * NS_PER_MS
    readings = device if isinstance(device, Device) else Device()
    kind = device if isinstance(device, str) else "cuda"
    return Profile(
        run=RunInfo(id="example", script="train.py", exit_code=0, torch="2.13.0", device=kind),
        status=Status.OK,
        steps=StepStats(
            count=steps + 1,
            warmup=1,
            total_time_ns=round(steps * step_ns),
            mean_ns=step_ns,
            median_ns=step_ns,
            p95_ns=1.1 * step_ns,
            p99_ns=1.2 * step_ns,
        ),
        phase_time_ns={phase: time_ms * NS_PER_MS for phase, time_ms in times.items()},
        device=readings,
        **parts,
    )


GIB = 2**30


def card(**readings: Any) -> Device:
    """Returns a healthy, busy device about like an A100, except for the readings given."""
    usual: dict[str, Any] = {
        "name": "an A100",
        "capability": (8, 0),
        "busy_share": 0.95,
        "sm_share": 0.9,
        "idle_ns": {Phase.FORWARD: 1e6},
        "launch_bound_ns": 1e6,
        "num_kernels": 800.0,
        "fp32_flops_per_s": 19.5e12,
        "bandwidth_bytes_per_s": 1.5e12,
        "total_bytes": 80 * GIB,
        "peak_bytes": 60 * GIB,
        "reserved_bytes": 64 * GIB,
        "allocated_bytes": 60 * GIB,
        "inactive_split_bytes": 2 * GIB,
        "alloc_retries": 0,
        "retry_ns": 0.0,
        "layout_share": 0.0,
        "tf32": True,
        "cudnn_tf32": True,
        "autocast_dtype": "",
        "clock_share": 0.97,
        "throttle_reasons": {},
        "power_limit_share": 1.0,
    }
    return Device(**{**usual, **readings})
