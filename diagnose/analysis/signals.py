"""What a rank's records say besides times: the operating system's readings, and the program's facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from diagnose.analysis.program import made
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.settings import Settings
from diagnose.core.units import NS_PER_S
from diagnose.store.reader import RankLog

LEAST_THREAD_CPUS = 0.02
"""A thread that uses less of a CPU is not worth a word."""


def host_stats(log: RankLog, warmup: int) -> HostStats:
    """Reads the operating system's totals over the measured steps.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
    """
    meta = log.meta
    settings = meta.get("facts", {}).get("settings", {})
    limits = log.vitals[-1][2] if log.vitals else {}
    known = HostStats(
        cpus=settings.get("cpus", meta.get("cpus")),
        machine_cpus=meta.get("machine_cpus"),
        cpuset_cpus=meta.get("cpuset_cpus"),
        quota_cpus=limits.get("quota"),
        num_threads=settings.get("num_threads", meta.get("num_threads")),
    )
    rows = [row for row in log.training_vitals if row[1] >= warmup]
    if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
        return known
    (begun_ns, _, first), (ended_ns, _, last) = rows[0], rows[-1]

    def grew(name: str) -> float | None:
        return float(last[name] - first[name]) if name in first and name in last else None

    def share(name: str, per: float = float(ended_ns - begun_ns)) -> float | None:
        total = grew(name)
        return total / per if total is not None and per else None

    def mean(name: str) -> float | None:
        values = [float(row[name]) for _, _, row in rows if name in row]
        return sum(values) / len(values) if values else None

    wall_s = (ended_ns - begun_ns) / NS_PER_S
    kernel, own_kernel = share("machine_kernel_ns"), share("kernel_ns")
    swapped = [row["swapped_bytes"] for _, _, row in rows if "swapped_bytes" in row]
    return replace(
        known,
        on_cpu_share=share("thread_cpu_ns"),
        system_share=share("thread_system_ns"),
        runnable_share=share("thread_delay_ns"),
        native_delay_share=share("native_delay_ns"),
        voluntary_per_s=share("voluntary", wall_s),
        involuntary_per_s=share("involuntary", wall_s),
        process_cpus=share("cpu_ns"),
        child_cpus=share("child_cpu_ns"),
        busy_cpus=share("machine_busy_ns"),
        kernel_cpus=None if kernel is None or own_kernel is None else max(0.0, kernel - own_kernel),
        stolen_cpus=share("machine_stolen_ns"),
        iowait_cpus=share("machine_iowait_ns"),
        busiest_core_share=mean("busiest_core_share"),
        full_cores=mean("full_cores"),
        python_threads=python_threads([row for _, _, row in rows], ended_ns - begun_ns),
        throttled_share=share("throttled", grew("periods") or 0),
        minor_faults_per_s=share("minor_faults", wall_s),
        major_faults_per_s=share("major_faults", wall_s),
        growth_bytes_per_s=share("resident_bytes", wall_s),
        read_bytes_per_s=share("read_bytes", wall_s),
        written_bytes_per_s=share("written_bytes", wall_s),
        swapped_bytes=max(swapped, default=None),
        memory_stall_share=share("memory_stall_ns"),
        anomaly_share=mean("anomaly"),
        profiler_share=mean("profiler"),
    )


def python_threads(readings: Sequence[Mapping[str, Any]], wall_ns: int) -> tuple[PythonThread, ...]:
    """Returns the Python threads that used a CPU, the busiest first. Threads may come and go."""
    used_ns: dict[tuple[str, str, int], int] = {}
    for before, after in pairwise(row.get("python_threads", {}) for row in readings):
        for native, (name, file, line, cpu_ns) in after.items():
            since = before[native][3] if native in before else 0
            used_ns[name, file, line] = used_ns.get((name, file, line), 0) + max(0, cpu_ns - since)
    found = [
        PythonThread(name=name, cpus=ns / wall_ns, file=file, line=line)
        for (name, file, line), ns in used_ns.items()
        if ns >= LEAST_THREAD_CPUS * wall_ns
    ]
    return tuple(sorted(found, key=lambda thread: -thread.cpus))


def settings_of(log: RankLog) -> Settings:
    """Reads how the process was set up."""
    settings: Settings = next(made(Settings, [log.meta.get("facts", {}).get("settings", {})]))
    return settings
