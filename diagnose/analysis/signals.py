"""What a rank's records say besides times: the operating system's readings, and the program's facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diagnose.core.host import HostStats
from diagnose.core.program import Loader, Optimizer, Program
from diagnose.store.reader import RankLog


def host_stats(log: RankLog, warmup: int) -> HostStats:
    """Reads the operating system's totals over the measured steps.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
    """
    meta = log.meta
    known = HostStats(cpus=meta.get("cpus"), num_threads=meta.get("num_threads"))
    rows = [row for row in log.vitals if row[1] >= warmup]
    if len(rows) < 2:
        return known
    (begun_ns, _, first), (ended_ns, _, last) = rows[0], rows[-1]
    wall_ns = ended_ns - begun_ns

    def share(name: str) -> float | None:
        if name not in first or name not in last or wall_ns <= 0:
            return None
        return (last[name] - first[name]) / wall_ns

    return HostStats(
        cpus=known.cpus,
        machine_cpus=meta.get("machine_cpus"),
        num_threads=known.num_threads,
        on_cpu_share=share("thread_cpu_ns"),
        runnable_share=share("thread_delay_ns"),
        process_cpus=share("cpu_ns"),
    )


def program_of(log: RankLog) -> Program:
    """Reads what hooks learnt of the script's live objects (`Recorder.facts`)."""
    facts: Mapping[str, Any] = log.meta.get("facts", {})
    return Program(
        loaders=tuple(_made(Loader, facts.get("loaders", ()))),
        optimizers=tuple(_made(Optimizer, facts.get("optimizers", ()))),
    )


def _made(kind: Any, facts: Iterable[Mapping[str, Any]]) -> Iterable[Any]:
    """Makes nouns of facts; what a newer version wrote and this one does not know is left out."""
    known = set(kind.__dataclass_fields__)
    return (kind(**{name: value for name, value in fact.items() if name in known}) for fact in facts)
