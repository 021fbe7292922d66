"""What the process and its machine did while the loop trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """Readings of the operating system over the measured steps. `None` was not measured.

    Attributes:
        cpus: CPUs that the process may use.
        machine_cpus: CPUs that the machine has.
        num_threads: Torch's intra-op threads.
        on_cpu_share: Part of the wall time that the training thread was on a CPU.
        runnable_share: Part of the wall time that it was ready to run and waited for a CPU.
        process_cpus: CPUs that the process used on average, all of its threads.
    """

    cpus: int | None = None
    machine_cpus: int | None = None
    num_threads: int | None = None
    on_cpu_share: float | None = None
    runnable_share: float | None = None
    process_cpus: float | None = None
