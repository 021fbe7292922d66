"""What loading costs a loop whose training thread does it itself, and what workers would win of that. A
rule's page lists this file's thresholds, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader
from diagnose.core.units import format_ms, format_share
from diagnose.rules._machine import disk, waits_for_disk
from diagnose.rules._supply import (
    CPU_CURED,
    CURED,
    HANDOVER_NS,
    HEADROOM,
    MIN_HANDOVERS,
    begins_anew,
    computing_ns,
    main_loader,
)
from diagnose.rules._worker_line import MIN_SHARE as MIN_LINE
from diagnose.rules._worker_line import Where
from diagnose.rules.base import Rule

MIN_SHARE = 0.04
"""Of the step; less is not worth worker processes. So much is expected of them at least where no CPU seems
to be free: threads that spin look like work, and only a trial tells."""

LEAST, MOST = 0.8, 1.15
"""Workers never hide all of it, and what loads between two steps also empties the caches that they use."""

BLOCKED = 0.7
"""The loop stands off the CPU for this part of its loading or more: it waits for a disk or a network."""

BY_OTHERS = 0.8
"""Other threads that compute for so much of the time that the loop stands off the CPU: where it waits for
them, one at least computes all the time."""

SEEN_NS = 10_000_000
"""A line that takes less of a step is not seen standing: what passes between two samples, 2.5 to 4.5 ms, is
that of the lines around it, too. Measured: 95 % of an `optimizer.step()` of 1 ms, beside samples that
sleep."""

LEAST_STANDING = 0.05
"""Of the step; less is chance."""

COMPUTING = 0.3
"""And for less than this: it computes."""

WAITING_PER_CPU = 4
"""Workers that wait take turns on a CPU; more of them are processes and memory for little."""

CAUSE_ACTIONS = ("dataset-cache", "loader-workers", "fork-continuation", "loader-workers-reseeded")
"""What helps where loading has another cause than that there are no workers: these win a part, too."""


class SerialRule(Rule):
    """A rule that applies where the training thread loads its own batches."""

    def applies(self, profile: Profile) -> bool:
        loader = main_loader(profile)
        return loader is not None and not loader.num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Serial:
    """One loader without workers, and the loop that stands still while it loads; nanoseconds of the mean
    step that begins no epoch.

    Attributes:
        wait_ns: In `next(loader)`, but not in its sampler.
        loading_ns: That, without what taking a batch over from a worker would take instead.
        lost_ns: What would be won if somebody else did it.
        high_ns: The most of that.
        compute_ns: What such a step takes else.
        workers: How many would keep up: at most one per CPU, or some where they only wait.
        won_ns: What so many would win; no more than the CPUs allow, and below 0 where they only cost.
        by_one_ns: What one would.
        handover_ns: What taking the batches over from workers takes.
        cpus: CPUs that the process may use; `None` when unknown.
        off_cpu: Part of its loading that the loop stands off the CPU; `None` when unknown.
    """

    loader: Loader
    step_ns: float
    wait_ns: float
    loading_ns: float
    lost_ns: float
    high_ns: float
    compute_ns: float
    workers: int
    won_ns: float
    by_one_ns: float
    handover_ns: float
    cpus: float | None
    off_cpu: float | None

    @property
    def by_workers_ns(self) -> float:
        """What is to be expected of workers at least: see `MIN_SHARE`."""
        return self._expected(self.won_ns)

    @property
    def by_a_worker_ns(self) -> float:
        """Likewise of one."""
        return self._expected(self.by_one_ns)

    @property
    def waits(self) -> bool:
        """Whether loading is waiting, as far as is known."""
        return (self.off_cpu or 0.0) >= BLOCKED

    @property
    def is_short(self) -> bool:
        """Whether workers would win nothing, as handing over takes as long."""
        return self.wait_ns < MIN_HANDOVERS * self.handover_ns

    @property
    def cured_by_workers(self) -> bool:
        """Whether workers would take most of it away: then the fault is that there are none."""
        return self.won_ns >= (CURED if self.waits else CPU_CURED) * self.loading_ns

    def _expected(self, won_ns: float) -> float:
        return min(self.lost_ns, max(MIN_SHARE * self.step_ns, won_ns))

    def evidence(self, profile: Profile) -> tuple[str, ...]:
        """Returns the sentences that all faults of such a loop have in common."""
        spent = f"num_workers=0, and {format_ms(self.wait_ns)} of each step pass in next(loader)."
        fetch_ns, collate_ns = profile.input.fetch_ns, profile.input.collate_ns
        if fetch_ns is None or collate_ns is None:
            return (spent,)
        return (
            spent,
            f"A batch takes {format_ms(fetch_ns)} to fetch and {format_ms(collate_ns)} to collate.",
        )

    def whether_it_computes(self, profile: Profile) -> tuple[str, ...]:
        """Says whether loading computes or waits."""
        if self.off_cpu is None:
            return ()
        if self.waits:
            return (
                "The training thread is off the CPU meanwhile: it waits for a disk, a network or a sleep.",
                *disk(profile.host),
            )
        if self.off_cpu <= COMPUTING and not waits_for_disk(profile.host):
            return (
                "The training thread is on the CPU meanwhile: it computes, it does not wait for a disk.",
            )
        return disk(profile.host)

    def won_by(self, profile: Profile) -> Mapping[str, float]:
        """Returns the actions that give workers, and what each is expected to win; none where no worker can
        load what is loaded here."""
        if self.is_short or takes_rewriting(profile, self.loader) or profile.input.asked_aside:
            return {}
        return {
            "loader-workers": self.by_workers_ns,
            "loader-workers-reseeded": self.by_workers_ns,
            "fork-continuation": self.by_a_worker_ns,
        }

    @property
    def or_workers(self) -> str:
        """What workers would win beside another cure, in a sentence to go on with; empty where that is
        little."""
        if self.won_ns < MIN_SHARE * self.step_ns or self.loader.iterable:
            return ""
        won = format_share(min(1.0, self.won_ns / self.wait_ns))
        them = "a worker" if self.workers == 1 else f"{self.workers} workers"
        return f" Or give the DataLoader {them}: that wins about {won} of the wait."


def takes_rewriting(profile: Profile, loader: Loader) -> bool:
    """Whether more is to be changed than an argument of the loader before workers can help: they cannot use
    a device, divide no stream by themselves, and help nobody who leaves each epoch after a batch."""
    return bool(loader.iterable or loader.on_device or loader.moves_batches or begins_anew(profile, loader))


def serial_of(profile: Profile, *, short: bool = False) -> Serial | None:
    """Returns what loading costs the training thread that does it; `None` where workers load, where the
    wait was not measured, and where it is too short for anybody to care.

    Args:
        profile: The run.
        short: Whether it may be too short for workers.
    """
    loader, wait_ns = main_loader(profile), profile.input.steady_wait_ns
    if loader is None or loader.num_workers or wait_ns is None:
        return None
    step_ns = profile.step_time_ns
    other_ns = (1 - profile.input.main_wait_share) * wait_ns  # for loaders that have workers
    wait_ns = min(wait_ns - other_ns, profile.spent_ns(Phase.DATA_WAIT))
    drawing_ns = min(wait_ns, profile.input.own_drawing_ns or 0.0)  # it would go on to, whoever loads
    wait_ns -= drawing_ns
    handover_ns = HANDOVER_NS * (profile.input.batches_per_step or 1.0)
    loading_ns = wait_ns if short else wait_ns - handover_ns
    if loading_ns < MIN_SHARE * step_ns or not (short or wait_ns >= MIN_HANDOVERS * handover_ns):
        return None
    compute_ns = computing_ns(profile) + other_ns + drawing_ns
    training_ns = compute_ns + wait_ns
    workers = _workers_for(profile, wait_ns, compute_ns)
    cpus = profile.own_cpus
    # The CPUs bound what workers win: all that the process computes now has to be done then too.
    least_ns = (profile.host.process_cpus or 0.0) * training_ns / (cpus or 1)
    won_ns, by_one_ns = (
        training_ns
        - max(compute_ns, wait_ns / num, least_ns, compute_ns + _taken_ns(profile, wait_ns, num))
        - handover_ns
        for num in (workers, 1)
    )
    lost_ns, high_ns = loading_ns, MOST * wait_ns
    if cpus and cpus < 2 and profile.run.device == "cpu":  # it does one or the other
        lost_ns = min(loading_ns, max(MIN_SHARE * step_ns, won_ns))
        high_ns = MOST * lost_ns
    return Serial(
        loader=loader,
        step_ns=step_ns,
        wait_ns=wait_ns,
        loading_ns=loading_ns,
        lost_ns=lost_ns,
        high_ns=high_ns,
        compute_ns=compute_ns,
        workers=workers,
        won_ns=won_ns,
        by_one_ns=by_one_ns,
        handover_ns=handover_ns,
        cpus=cpus,
        off_cpu=_off_cpu(profile, wait_ns),
    )


def has_other_cause(profile: Profile, *, short: bool = False) -> bool:
    """Whether to ask why loading takes so long: the training thread does it, and workers would not take
    most of it away. Arguments as of `serial_of`."""
    serial = serial_of(profile, short=short)
    return (
        serial is not None
        and not serial.cured_by_workers
        and not serial.loader.on_device
        and not serial.loader.moves_batches
        and not begins_anew(profile, serial.loader)
    )


def where_loading(profile: Profile, loader: Loader) -> Where:
    """Returns the line that the training thread spends most of its loading in."""
    lines = [line for line in profile.where if line.phase is Phase.DATA_WAIT and not line.in_worker]
    line = max(lines, key=lambda line: line.share, default=None)
    if line is None or line.share < MIN_LINE * (profile.share(Phase.DATA_WAIT) or 0.0):
        return Where(file=loader.file, line=loader.line)
    return Where.seen(line)


def _workers_for(profile: Profile, load_ns: float, compute_ns: float) -> int:
    wanted = max(1, ceil(HEADROOM * load_ns / max(1.0, compute_ns)))
    waits = (_off_cpu(profile, load_ns) or 0.0) >= BLOCKED
    cpus = max(1, int(profile.own_cpus or wanted))
    return min(wanted, cpus * (WAITING_PER_CPU if waits else 1))


def _taken_ns(profile: Profile, load_ns: float, workers: int) -> float:
    """Returns how much longer computing takes with workers beside it.

    Where torch has a thread on each CPU, an operation ends when the last of them has, so it stands still
    while a worker has the CPU of one. Measured: 0.89 of the speed where one worker took over 10 % of the
    step of pytorch/examples mnist on two CPUs (`docs/case-studies.md`).
    """
    host, off_cpu = profile.host, _off_cpu(profile, load_ns)
    cpus = (
        host.cpus or 0
    ) / profile.settings.local_processes  # whatever the quota: threads take turns on them
    if not cpus or off_cpu is None or (host.num_threads or 1) < cpus:
        return 0.0
    return load_ns * (1 - min(1.0, max(0.0, off_cpu))) / min(workers, max(1.0, cpus))


def _off_cpu(profile: Profile, load_ns: float) -> float | None:
    """Returns the part of its loading that the loop stands off the CPU, where its time there can be nothing
    else: not what other lines were seen to, such as those that wait for other ranks. `None` where it may
    wait for threads that compute meanwhile, as decoders do."""
    host = profile.host
    if host.on_cpu_share is None or host.runnable_share is None or profile.run.device != "cpu":
        return None
    lines = [line for line in profile.where if line.phase is not Phase.DATA_WAIT and not line.in_worker]
    seen = [line for line in lines if line.share * profile.step_time_ns >= SEEN_NS]
    elsewhere = sum(line.share * (line.off_cpu or 0.0) for line in seen) - host.runnable_share
    stands = max(0.0, 1 - host.on_cpu_share - host.runnable_share - max(0.0, elsewhere))
    if host.num_threads and host.process_cpus and stands >= LEAST_STANDING:
        others = host.process_cpus - host.on_cpu_share * host.num_threads
        if others >= BY_OTHERS * stands:
            return None
    return stands * profile.step_time_ns / load_ns
