"""What the records of one run come to: its figures, and how busy its machine was."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diagnose.analysis.device import device_of
from diagnose.analysis.signals import host_stats
from diagnose.analysis.stopped import was_stopped
from diagnose.core.host import foreign_cpus
from diagnose.core.units import NS_PER_MS, NS_PER_S
from diagnose.gate.in_turns import stopped_ns
from diagnose.gate.job_steps import JobSteps, job_steps
from diagnose.gate.result import MachineState, Metric
from diagnose.gate.steps import MIN_STEPS, MIN_WARMUP, Vector, find_warmup, usual_cost
from diagnose.store.reader import RankLog
from diagnose.store.runs import Stops

LEAST_CPU_S = 1.0
"""CPU readings come twice a second: over less time they say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the steps of a run say."""

    figures: Mapping[Metric, float]
    num_steps: int = 0
    warmup: int = 0
    step_s: float = 0.0
    job: JobSteps | None = None


def figures_of(logs: Sequence[RankLog], warmup: int | None, started_ns: int, stops: Stops = ()) -> Figures:
    """Computes a run's figures from its ranks' records: those of the job, of all ranks together.

    Args:
        logs: The ranks that recorded steps. Of the memory of their devices the fullest counts, with what it
            held before the first step.
        warmup: Leading steps to leave out; `None` to find how many, `MIN_WARMUP` at least.
        started_ns: When the script's process began, on the clock of the records.
        stops: When it was stopped: those steps are left out; of the mean, that time alone.
    """
    if not logs:
        return Figures(figures={})
    job = job_steps(logs)
    first_end_ns = int(job.end_N[0])
    startup_ns = first_end_ns - started_ns - stopped_ns(stops, first_end_ns, since_ns=started_ns)
    figures = {Metric.STARTUP: startup_ns / NS_PER_S}
    if warmup is None:
        warmup = max(MIN_WARMUP, find_warmup(job.time_N, job.compiled_N))
    counts_N = ~was_stopped(job.end_N, job.time_N, stops)
    counts_N[:warmup] = False
    time_N, samples_N, tokens_N = (each[counts_N] for each in (job.time_N, job.samples_N, job.tokens_N))
    of_job = Figures(figures=figures, num_steps=len(time_N), warmup=warmup, job=job)
    if len(time_N) < MIN_STEPS:
        return of_job
    usual_ns = float(usual_cost(time_N))
    figures[Metric.STEP_MS] = usual_ns / NS_PER_MS
    for metric, amount_N in ((Metric.SAMPLES_PER_S, samples_N), (Metric.TOKENS_PER_S, tokens_N)):
        rate = _usual_rate(time_N, amount_N)
        if rate is not None:
            figures[metric] = rate
    cpu_ms = _cpu_ms(logs, warmup)
    if cpu_ms is not None:
        figures[Metric.CPU_MS] = cpu_ms
    peak_bytes = max((device_of(log, warmup).peak_bytes or 0 for log in logs), default=0)
    if peak_bytes:
        figures[Metric.PEAK_DEVICE_MEMORY] = peak_bytes
    samples = float(job.samples_N[warmup:].sum())
    if samples:
        began_ns, ended_ns = int(job.end_N[warmup] - job.time_N[warmup]), int(job.end_N[-1])
        ran_ns = float(job.time_N[warmup:].sum()) - stopped_ns(stops, ended_ns, since_ns=began_ns)
        figures[Metric.MEAN_SAMPLES_PER_S] = samples * NS_PER_S / ran_ns
    return replace(of_job, step_s=usual_ns / NS_PER_S)


def _usual_rate(time_N: Vector, amount_N: Vector) -> float | None:
    known_N = amount_N > 0
    if known_N.sum() < MIN_STEPS:
        return None
    return NS_PER_S / float(usual_cost(time_N[known_N] / amount_N[known_N]))


def _cpu_ms(logs: Sequence[RankLog], warmup: int) -> float | None:
    """Returns the CPU time per step of the ranks and their workers together."""
    total_ms = 0.0
    for log in logs:
        rows = [row for row in log.training_vitals if row[1] >= warmup and "cpu_ns" in row[2]]
        if len(rows) < 2 or rows[-1][0] - rows[0][0] < LEAST_CPU_S * NS_PER_S:
            return None
        (_, first_step, first), (_, last_step, last) = rows[0], rows[-1]
        if last_step - first_step < MIN_STEPS:
            return None
        used_ns = sum(last.get(key, 0) - first.get(key, 0) for key in ("cpu_ns", "child_cpu_ns"))
        total_ms += used_ns / NS_PER_MS / (last_step - first_step)
    return total_ms


def machine_state(logs: Sequence[RankLog], warmup: int) -> MachineState:
    """Returns what else the machine of the first rank did after the warm-up, and its load now."""
    load = os.getloadavg()[0]
    if not logs:
        return MachineState(load=load)
    here = [log for log in logs if log.meta.get("host") == logs[0].meta.get("host")]
    hosts = [host_stats(log, warmup) for log in here]
    host = hosts[0]
    return MachineState(
        load=load,
        cpus=host.cpus,
        foreign_cpus=foreign_cpus(hosts),
        stolen_cpus=host.stolen_cpus,
        throttled_share=host.throttled_share,
        system_share=host.system_share,
        minor_faults_per_s=host.minor_faults_per_s,
    )
