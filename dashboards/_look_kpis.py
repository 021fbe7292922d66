"""The figures of a run that its page begins with."""

from __future__ import annotations

import numpy as np
from diagnose.dashboards._snapshot import Snapshot, Vector

from diagnose.core.liveness import State
from diagnose.core.units import NS_PER_MS, format_bytes, format_duration, format_rate
from diagnose.report.base import Fact
from diagnose.report.summary import measured

NOW_STEPS = 100
"""Newest steps that `now` is the mean of: enough to be calm, few enough to follow a change."""


def kpis(snap: Snapshot) -> list[Fact]:
    """Returns how fast it goes now, how fast it went, and what it takes."""
    facts = []
    if snap.liveness.state is State.RUNNING and len(snap.recent):
        facts += _now(snap.recent.step_ms[-NOW_STEPS:], snap.recent.samples_per_s[-NOW_STEPS:])
    if snap.profile is not None:
        facts += measured(snap.profile)
    resident = snap.vitals.resident_bytes
    if np.isfinite(resident).any():
        now = float(resident[np.isfinite(resident)][-1])
        peak = f"at most {format_bytes(float(np.nanmax(resident)))}"
        facts.append(Fact(label="memory", value=format_bytes(now), detail=peak))
    return facts


def _now(step_ms: Vector, samples_per_s: Vector) -> list[Fact]:
    """Returns the samples by the time that they took: a mean of the steps' rates would hide a stall."""
    known = np.isfinite(step_ms)
    if not known.any():
        return []
    mean_ms = float(np.mean(step_ms[known]))
    rated = known & np.isfinite(samples_per_s)
    time_ms = float(step_ms[rated].sum())
    value = format_duration(mean_ms * NS_PER_MS)
    if time_ms:
        rate = float((samples_per_s[rated] * step_ms[rated]).sum()) / time_ms
        value = f"{format_rate(rate)} samples/s"
    return [Fact(label="now", value=value, detail=f"mean of the newest {known.sum()} steps")]
