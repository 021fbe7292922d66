"""What the process and its machine did while the loop trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonThread:
    """A Python thread of the script beside the one that trains.

    Attributes:
        cpus: CPUs that it used on average.
        file: Where the function that it runs is defined; empty when unknown.
        line: Its line.
    """

    name: str
    cpus: float
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """Readings of the operating system over the measured steps. `None` was not measured.

    Attributes:
        cpus: CPUs that the process is bound to.
        cpuset_cpus: CPUs that its control group lets it be bound to.
        machine_cpus: CPUs that the machine has.
        num_threads: Torch's intra-op threads.
        on_cpu_share: Part of the wall time that the training thread was on a CPU.
        system_share: Part of the wall time that it was in the kernel, on a CPU: system calls, page faults.
        runnable_share: Part of the wall time that it was ready to run and waited for a CPU.
        native_delay_share: Time that the process's threads that are not Python's, such as torch's, waited
            for a CPU, all of them together, per wall time.
        voluntary_per_s: How often the training thread gave its CPU up, to wait for something.
        involuntary_per_s: How often its CPU was taken from it.
        process_cpus: CPUs that the process used on average, all of its threads.
        child_cpus: CPUs that its children used, such as DataLoader workers.
        busy_cpus: CPUs of the machine that were in use, by anybody.
        kernel_cpus: CPUs of these on which the kernel worked for others than this process and its children,
            its own threads and interrupts included.
        stolen_cpus: CPUs that the machine's host gave to other guests while this one wanted them.
        iowait_cpus: CPUs of the machine that were idle while a process waited for a disk, on average.
        busiest_core_share: Part of the time that the busiest of `cpus` was busy, from half a second to the
            next: near 1 where one core is full all the time, whichever it is.
        full_cores: How many of `cpus` were busy all the time, on average.
        python_threads: The busiest other Python threads, those that used any CPU to speak of.
        quota_cpus: CPUs that the control group may use; `None` without a quota.
        throttled_share: Part of the accounting periods in which the quota was used up.
        minor_faults_per_s: Page faults of the process that only needed memory.
        major_faults_per_s: Page faults that had to read the disk.
        growth_bytes_per_s: By how much the process became larger.
        read_bytes_per_s: Bytes that this process had read from storage, its workers not counted.
        written_bytes_per_s: Likewise written.
        swapped_bytes: Memory of the process that is swapped out, at most.
        memory_stall_share: Part of the wall time in which some task of the machine waited for memory.
        anomaly_share: Part of the readings that found torch's anomaly detection on.
        profiler_share: Part of the readings that found torch's profiler on.
    """

    cpus: int | None = None
    cpuset_cpus: int | None = None
    machine_cpus: int | None = None
    num_threads: int | None = None
    on_cpu_share: float | None = None
    system_share: float | None = None
    runnable_share: float | None = None
    native_delay_share: float | None = None
    voluntary_per_s: float | None = None
    involuntary_per_s: float | None = None
    process_cpus: float | None = None
    child_cpus: float | None = None
    busy_cpus: float | None = None
    kernel_cpus: float | None = None
    stolen_cpus: float | None = None
    iowait_cpus: float | None = None
    busiest_core_share: float | None = None
    full_cores: float | None = None
    python_threads: tuple[PythonThread, ...] = ()
    quota_cpus: float | None = None
    throttled_share: float | None = None
    minor_faults_per_s: float | None = None
    major_faults_per_s: float | None = None
    growth_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    written_bytes_per_s: float | None = None
    swapped_bytes: int | None = None
    memory_stall_share: float | None = None
    anomaly_share: float | None = None
    profiler_share: float | None = None

    @property
    def usable_cpus(self) -> float | None:
        """CPUs whose time the process can have: those that it is bound to, or its quota if that is less."""
        known = [cpus for cpus in (self.cpus, self.quota_cpus) if cpus is not None]
        return min(known, default=None)

    @property
    def whole_cpus(self) -> int | None:
        """How many threads or processes can always compute at once: whole CPUs of `usable_cpus`."""
        return None if self.usable_cpus is None else max(1, int(self.usable_cpus))

    @property
    def off_cpu_share(self) -> float | None:
        """Part of the wall time that the training thread waited for something else than a CPU."""
        if self.on_cpu_share is None or self.runnable_share is None:
            return None
        return max(0.0, 1 - self.on_cpu_share - self.runnable_share)

    @property
    def used_cpus(self) -> float | None:
        """CPUs that the process and its children used."""
        return None if self.process_cpus is None else self.process_cpus + (self.child_cpus or 0.0)

    @property
    def idle_cpus(self) -> float | None:
        """CPUs of the machine that nobody used."""
        if self.busy_cpus is None or self.machine_cpus is None:
            return None
        return max(0.0, self.machine_cpus - self.busy_cpus - (self.stolen_cpus or 0.0))

    @property
    def free_cpus(self) -> float | None:
        """CPUs of the machine that nobody used, as far as the quota lets the process use more."""
        if self.idle_cpus is None or self.quota_cpus is None:
            return self.idle_cpus
        return min(self.idle_cpus, max(0.0, self.quota_cpus - (self.used_cpus or 0.0)))


def foreign_cpus(hosts: Sequence[HostStats]) -> float | None:
    """Returns the CPUs that others used than these processes of one machine, and other guests of its host;
    `None` where that was not measured."""
    own = [host.used_cpus for host in hosts]
    busy = hosts[0].busy_cpus if hosts else None
    if busy is None or None in own:
        return None
    return max(0.0, busy - sum(cpus or 0.0 for cpus in own)) + (hosts[0].stolen_cpus or 0.0)
