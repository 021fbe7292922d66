"""What the machine's own readings prove of a fault, in words; each says nothing where they are usual."""

from __future__ import annotations

from diagnose.core.host import HostStats
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes

FULL_CORES = 0.8
"""A core counts as full from so many on, on average: between two readings a thread may change its core."""

ONE_CORE = 1.5
"""And more are not one any more."""

WAITING_CPUS = 0.1
"""CPUs that stood idle for a disk: the log of a system that is left alone comes to a hundredth."""

BYTES_PER_S = 1 << 20
"""Traffic with storage: a training that logs and saves now and then stays below."""

STORAGE_BYTE_NS = 2.5
"""CPU time that others take, at most, for each byte that a process reads from storage: threads of the
kernel, and the host of a virtual machine, which counts as stolen. Measured on a virtual machine of two
CPUs, 64 KiB at a time, past the page cache; the process itself took 0.6."""


def one_core(host: HostStats) -> tuple[str, ...]:
    """Says that one core is full while others are not: whatever computes, does it in one thread."""
    full, cpus = host.full_cores, host.cpus
    if full is None or cpus is None or cpus < 2 or not FULL_CORES <= full < ONE_CORE:
        return ()
    rest = "the other was not" if cpus == 2 else f"the other {cpus - 1} were not"
    return (f"One CPU was busy all the time, {rest}: one thread computed at a time.",)


def disk(host: HostStats) -> tuple[str, ...]:
    """Says that CPUs stood idle for a disk, and what the process read and wrote."""
    said = []
    if waits_for_disk(host):
        idle = f"{host.iowait_cpus:.1f} of {host.machine_cpus}" if host.machine_cpus else "Some"
        said.append(f"{idle} CPUs of the machine stood idle while a process waited for a disk.")
    moved = [f"{verb} {format_bytes(rate)}/s" for verb, rate in traffic(host)]
    if moved:
        said.append(f"This process {' and '.join(moved)}, beyond the page cache.")
    return tuple(said)


def waits_for_disk(host: HostStats) -> bool:
    """Whether a disk keeps CPUs idle that somebody wanted."""
    return host.iowait_cpus is not None and host.iowait_cpus >= WAITING_CPUS


def traffic(host: HostStats) -> list[tuple[str, float]]:
    """Returns what is worth a word of what the process read from storage and wrote to it, per second."""
    rates = (("read", host.read_bytes_per_s), ("wrote", host.written_bytes_per_s))
    return [(verb, rate) for verb, rate in rates if rate is not None and rate >= BYTES_PER_S]


def storage_cpus(profile: Profile) -> float:
    """Returns how many of the CPUs that others used may have read what this run reads from storage, workers
    included. Nobody tells whom the kernel works for, so it is what such reading takes at most, and no more
    than the kernel and the host of a virtual machine took."""
    early, late = profile.input.early_read_bytes, profile.input.late_read_bytes
    if not early or not late or not profile.step_time_ns:
        return 0.0
    others, host = profile.foreign_cpus or 0.0, profile.host
    if host.kernel_cpus is not None:
        others = min(others, host.kernel_cpus + (host.stolen_cpus or 0.0))
    return min(others, STORAGE_BYTE_NS * min(early, late) / profile.step_time_ns)
