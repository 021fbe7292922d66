"""The report for programs. Versioned: a key once published keeps its meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diagnose.core.deep_window import DeepWindow
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile, RunInfo, SourceLine
from diagnose.core.trial import Measured, Trial, Tuning
from diagnose.core.units import NS_PER_MS
from diagnose.report._faults import in_force

SCHEMA = 1
LINE_KEYS = ("phase", "file", "line", "function", "share", "num_samples", "in_worker", "text", "via")


def to_json(profile: Profile) -> dict[str, Any]:
    """Returns the report as the JSON object of schema 1: every key always there, every number finite.

    What was not measured is `null` or an empty list, never 0.
    """
    throughput, steps, tuning = profile.throughput, profile.steps, profile.tuning or Tuning()
    report = {
        "schema": SCHEMA,
        "run": run_as_json(profile.run),
        "status": profile.status.value,
        "throughput": {
            "samples_per_s": throughput.samples_per_s,
            "samples_per_s_ci95": throughput.samples_per_s_ci95,
            "tokens_per_s": throughput.tokens_per_s,
            "steps_per_s": throughput.steps_per_s,
        },
        "steps": {
            "count": steps.count,
            "warmup": steps.warmup,
            "left_out": steps.left_out,
            "mean_ms": _ms(steps.mean_ns),
            "median_ms": _ms(steps.median_ns),
            "p95_ms": _ms(steps.p95_ns),
            "p99_ms": _ms(steps.p99_ns),
        },
        "phases": _phases(profile.phase_time_ns),
        "clock": {"device_share": profile.device_clock_share},
        "where": [_line(line) for line in profile.where],
        "overhead": asdict(profile.overhead),
        "findings": [_finding(finding, profile) for finding in profile.findings],
        "abstained": [asdict(abstention) for abstention in profile.abstained],
        "num_rules": profile.num_rules,
        "trials": [_trial(trial) for trial in tuning.trials],
        "confirmation": _confirmation(tuning.confirmation),
        "earlier_confirmation": _confirmation(tuning.earlier),
        "tuning": {
            "state": tuning.state,
            "undone": tuning.undone,
            "dropped": dict(tuning.dropped),
            "errors": list(tuning.errors),
            "frozen": tuning.frozen,
            "after": {
                "median_ms": _ms(tuning.tuned_median_ns),
                "samples_per_s": tuning.tuned_samples_per_s,
                "phases": _phases(tuning.tuned_phase_time_ns),
            },
        }
        if profile.tuning
        else None,
        "ranks": [_rank(rank) for rank in profile.ranks],
        "input": asdict(profile.input),
        "host": asdict(profile.host),
        "deep_window": _window(profile.deep_window),
        "events": dict(profile.events),
        "notes": list(profile.notes),
    }
    return {key: finite(value) for key, value in report.items()}


def _window(window: DeepWindow | None) -> dict[str, Any] | None:
    """Times are in nanoseconds, as their keys say, and of all its recorded steps together."""
    return None if window is None else {**asdict(window), "mfu": window.mfu}


def _trial(trial: Trial) -> dict[str, Any]:
    measured = trial.measured
    return {
        "action": trial.action,
        "value": trial.value,
        "safety": trial.safety.value,
        "state": trial.outcome.value,
        "reason": trial.reason,
        "rule": trial.rule,
        "predicted_speedup": trial.predicted.speedup if trial.predicted else None,
        "measured_speedup": measured.speedup if measured else None,
        "ci": [measured.low, measured.high] if measured else None,
        "detectable_speedup": measured.detectable if measured else None,
        "pairs": measured.pairs if measured else 0,
        "first_step": trial.first_step,
        "steps_spent": trial.steps_spent,
        "settings": dict(trial.settings),
    }


def _confirmation(confirmed: Measured | None) -> dict[str, Any] | None:
    if confirmed is None:
        return None
    return {
        "speedup": confirmed.speedup,
        "ci": [confirmed.low, confirmed.high],
        "pairs": confirmed.pairs,
        "step_ms": [_ms(confirmed.without_ns), _ms(confirmed.with_ns)],
    }


def run_as_json(run: RunInfo) -> dict[str, Any]:
    """Returns which program ran, as `report`, `runs` and `compare` all name it."""
    return {**asdict(run), "argv": list(run.argv)}


def finite(value: Any) -> Any:
    """Returns `value` as JSON has it: tuples as lists, a number that is not finite as null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / NS_PER_MS


def _phases(phase_time_ns: Mapping[Phase, float]) -> list[dict[str, Any]]:
    """Returns the measured phases in a step's order, always with `other`; nothing without steps."""
    step_ns = sum(phase_time_ns.values())
    if not step_ns:
        return []
    phase_time_ns = {Phase.OTHER: 0.0, **phase_time_ns}
    return [
        {
            "name": phase.value,
            "ms_per_step": _ms(phase_time_ns[phase]),
            "share": phase_time_ns[phase] / step_ns,
        }
        for phase in Phase
        if phase in phase_time_ns
    ]


def _finding(finding: Finding, profile: Profile) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "summary": finding.summary,
        "lost_ms_per_step": _ms(finding.lost_ns_per_step),
        "phases": {phase.value: _ms(lost_ns) for phase, lost_ns in finding.lost_ns.items()},
        "gain": asdict(finding.gain(profile.step_time_ns)),
        "gain_of_fix": asdict(finding.gain_of_fix(profile.step_time_ns)),
        "assumption": finding.assumption,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "code": finding.code,
        "file": finding.file,
        "line": finding.line,
        "ranks": finding.ranks,
        "actions": finding.actions,
        "in_force": in_force(finding, profile),
        "gains": {name: asdict(finding.gain(profile.step_time_ns, name)) for name in finding.actions},
    }


def _line(line: SourceLine) -> dict[str, Any]:
    return {key: getattr(line, key) for key in LINE_KEYS} | {"phase": line.phase.value}


def _rank(rank: RankProfile) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "phases": _phases(rank.phase_time_ns),
        "late_ms_per_step": _ms(rank.late_ns_per_step),
    }
