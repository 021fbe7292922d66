"""Torch's threads fall asleep between operations"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.settings import Settings
from diagnose.core.units import format_duration, format_share
from diagnose.rules._cpus import spread
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, doing, waiting_share
from diagnose.rules._phases import STEP
from diagnose.rules.base import Rule

MIN_WAITING = 0.1
"""The training thread waits for something else than a CPU for this part of the time, or more."""

MIN_WAITS_PER_S = 1_000
"""And that often: once in nearly every operation that is divided among threads."""

MAX_WAIT_NS = 1_000_000
"""A thread that has to be woken comes within this; longer waits are for something else."""

MAX_HELD = 0.05
"""CPUs that the script's other Python threads may use: the interpreter's lock is waited for likewise."""

ELSEWHERE = (Phase.DATA_WAIT, Phase.COPY, Phase.COMMUNICATION, Phase.CHECKPOINT)
"""Phases in which it may wait for workers, devices, ranks and disks."""

WAKING_NS = 22_000
"""What the kernel takes on the CPU for each wait: the part of the time in system calls over the number of
waits, in four jobs of the accuracy benchmark with `OMP_WAIT_POLICY=passive`."""

LOW, HIGH = 0.5, 1.4
"""Threads that stay awake still wait for the slowest of them; and those that slept find their caches cold.
In the four jobs, one run of each with the setting and one without, it cost 34 to 76 % of the step, 1.05 to
1.3 times what is expected here."""

ASLEEP = HostStats(
    num_threads=2, on_cpu_share=0.4, runnable_share=0.05, process_cpus=0.8, voluntary_per_s=4000.0
)
HOG = PythonThread(name="Thread-1 (watch)", cpus=0.5)


class SleepingThreads(Rule):
    """
    ## What it means
    Each operation is divided among torch's threads. Between two of them the threads should stay awake for a
    while, and here they sleep at once: the next operation has to wake them, which takes longer than a small
    operation does. `OMP_WAIT_POLICY=passive` asks for that, and so does a step that pauses between
    operations.

    ## What to do
    Unset the variable. Or give torch one thread where operations are small, which wakes nobody.

    ## When it is wrong
    Several trainings share the CPUs: threads that stay awake then keep those of others from working.
    """

    needs = ("host.on_cpu_share", "host.runnable_share", "host.voluntary_per_s", "host.num_threads")
    actions = ("set-threads",)
    spoils = ("small-operators",)
    fires_on = (
        profile(host=ASLEEP, settings=Settings(sleeps_by="OMP_WAIT_POLICY=passive")),
        profile(host=ASLEEP),
    )
    silent_on = (
        profile(host=replace(ASLEEP, on_cpu_share=0.93)),
        profile(host=replace(ASLEEP, voluntary_per_s=100.0)),
        profile(host=replace(ASLEEP, num_threads=1)),
        profile(host=replace(ASLEEP, num_threads=16, machine_cpus=2)),
        profile(host=replace(ASLEEP, python_threads=(HOG,))),
        profile(data_wait_ms=50, host=ASLEEP),
        profile(other_ms=50, where=(at("with self.db:", 0.5, "log"),), host=ASLEEP),
        profile(device="cuda", host=ASLEEP),
    )

    def applies(self, profile: Profile) -> bool:
        host, settings = profile.host, profile.settings
        threads = host.num_threads or 1
        # OpenMP lets threads sleep at once where there are more of them than CPUs: that is the fault then.
        crowded = threads * settings.local_processes > (host.machine_cpus or threads)
        return profile.run.device == "cpu" and threads > 1 and (bool(settings.sleeps_by) or not crowded)

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        assert host.voluntary_per_s is not None and host.off_cpu_share is not None
        if host.voluntary_per_s < MIN_WAITS_PER_S or sum(t.cpus for t in host.python_threads) > MAX_HELD:
            return None
        each_ns = 1e9 * host.off_cpu_share / host.voluntary_per_s
        written = sum(line.share for line in doing(profile, "log") if "wait" not in line.idiom)
        elsewhere = waiting_share(profile) + written
        elsewhere += sum(profile.share(phase) or 0.0 for phase in ELSEWHERE)
        waiting = host.off_cpu_share - elsewhere
        if waiting < MIN_WAITING or each_ns > MAX_WAIT_NS:
            return None
        waking = waiting + host.voluntary_per_s * WAKING_NS / 1e9
        lost = spread(profile, waking, STEP)
        total = sum(lost.values())
        if not total:
            return None
        asked = profile.settings.sleeps_by
        variable = asked.partition("=")[0]
        return Finding(
            rule=self.name,
            summary=f"Waking torch's {host.num_threads} threads for each operation takes"
            f" {format_share(total / profile.step_time_ns)} of the time",
            lost_ns=lost,
            low_ns=LOW * total,
            high_ns=min(HIGH * total, sum(spread(profile, 1.0, STEP).values())),
            assumption="threads that stay awake, or one alone, wait for nobody",
            evidence=(
                f"The training thread stopped {host.voluntary_per_s:,.0f} times a second, for"
                f" {format_duration(each_ns)} on average.",
                f"It waited for no CPU: it ran for {format_share(host.on_cpu_share or 0.0)} of the time.",
                *((f"The environment has {asked}.",) if asked else ()),
            ),
            fix=f"Unset {variable}, or give torch one thread." if asked else "Give torch one thread.",
            code=f"unset {variable}" if asked else "torch.set_num_threads(1)",
            actions=self.actions,
        )
