"""More threads compute than there are CPUs"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats, foreign_cpus
from diagnose.core.profile import Profile
from diagnose.core.settings import Settings
from diagnose.core.units import NS_PER_S, format_share
from diagnose.rules._cpus import spread
from diagnose.rules._examples import profile
from diagnose.rules._phases import STEP
from diagnose.rules.base import Rule

MIN_DELAY = 0.05
"""The training thread waits for a CPU for this part of the time, or more."""

MIN_SWITCHES_PER_S = 300
"""A team that fits on its CPUs keeps them: about 100 times a second at most is one taken from it, other
programs beside it or not. Eight threads on two CPUs may lose theirs 3000 times a second."""

MIN_TEAM_PART = 0.5
"""Or the other threads of the team use this part of what competes with the training thread. Threads that
spin or sleep at a barrier are seldom interrupted: 24 of convolutions on two CPUs 70 times a second."""

MIN_SLEEPS_PER_S = 2000
"""Or the training thread gives its CPU up so often: where OpenMP finds more threads than CPUs its barriers
sleep at once. Three to eight threads on two CPUs did that 4,000 to 18,000 times a second, and need not have
stood in line for long; a loop whose threads fit, beside workers, does it 900 times."""

SLEEP_NS = 50_000
"""What a step lost for each, measured likewise: 43 to 85 us."""

BOUNDS = (0.4, 1.35)
"""How the wait compares with what was lost, measured with 4 to 32 threads on two CPUs: the threads of some
operations sleep while they wait for each other, those of others spin."""

EIGHT_ON_TWO = HostStats(
    cpus=2,
    machine_cpus=2,
    num_threads=8,
    on_cpu_share=0.3,
    runnable_share=0.37,
    process_cpus=1.7,
    busy_cpus=1.8,
    involuntary_per_s=70.0,
)
ASLEEP = replace(
    EIGHT_ON_TWO, num_threads=3, on_cpu_share=0.5, runnable_share=0.02, process_cpus=1.1, busy_cpus=1.0
)
BESIDE_ANOTHER = replace(EIGHT_ON_TWO, process_cpus=0.6, busy_cpus=2.0, involuntary_per_s=3000.0)
A_TEAM_OF_FOUR = HostStats(
    cpus=8,
    machine_cpus=8,
    num_threads=8,
    on_cpu_share=0.5,
    runnable_share=0.3,
    process_cpus=2.0,
    involuntary_per_s=1000.0,
)
FITTING = replace(
    A_TEAM_OF_FOUR,
    cpus=2,
    machine_cpus=2,
    num_threads=2,
    runnable_share=0.5,
    process_cpus=1.0,
    involuntary_per_s=110.0,
)


class ThreadOversubscription(Rule):
    """
    ## What it means
    All processes of this machine together have more intra-op threads than there are CPUs. The threads of
    one operation wait for each other, so the slowest decides, and they take turns on the CPUs, or fall
    asleep and are woken, thousands of times a second.

    ## What to do
    Set `OMP_NUM_THREADS` to the number of CPUs divided by the number of processes, or call
    `torch.set_num_threads` with it.

    ## When it is wrong
    Threads that mostly wait for something else than a CPU.
    """

    needs = ("host.runnable_share", "host.on_cpu_share", "host.involuntary_per_s", "host.process_cpus")
    actions = ("set-threads",)
    of_host = True
    fires_on = (
        profile(host=BESIDE_ANOTHER),
        profile(host=EIGHT_ON_TWO),
        profile(host=replace(ASLEEP, voluntary_per_s=9000.0)),
        profile(host=A_TEAM_OF_FOUR, settings=Settings(local_processes=4)),
    )
    silent_on = (
        profile(host=replace(BESIDE_ANOTHER, involuntary_per_s=100.0)),
        profile(host=FITTING),
        profile(host=replace(ASLEEP, voluntary_per_s=900.0)),
    )

    def applies(self, profile: Profile) -> bool:
        host = profile.host
        if not host.num_threads or not host.cpus or not host.machine_cpus:
            return False
        # What is pinned to fewer CPUs than the machine has suffers from that.
        return host.num_threads * profile.settings.local_processes > host.machine_cpus

    def check(self, profile: Profile) -> Finding | None:
        host, processes = profile.host, profile.settings.local_processes
        assert host.num_threads and host.cpus and host.machine_cpus
        assert host.runnable_share is not None and host.on_cpu_share is not None
        assert host.involuntary_per_s is not None and host.process_cpus is not None
        team = max(0.0, host.process_cpus - host.on_cpu_share)
        others = (foreign_cpus([host]) or 0.0) + (host.child_cpus or 0.0)
        crowded = host.involuntary_per_s >= MIN_SWITCHES_PER_S or team > MIN_TEAM_PART * (team + others)
        sleeps = host.voluntary_per_s or 0.0
        share = host.runnable_share if crowded else 0.0
        if sleeps >= MIN_SLEEPS_PER_S:
            share = max(share, sleeps * SLEEP_NS / NS_PER_S)
        if share < MIN_DELAY:
            return None
        lost = spread(profile, share, STEP)
        total = sum(lost.values())
        if not total:
            return None
        then = max(1, host.machine_cpus // processes)
        of = f" in each of {processes} processes" if processes > 1 else ""
        return Finding(
            rule=self.name,
            summary=f"Torch has {host.num_threads} threads{of} on {host.machine_cpus} CPUs",
            lost_ns=lost,
            low_ns=BOUNDS[0] * total,
            high_ns=min(BOUNDS[1] * total, sum(spread(profile, 1.0, STEP).values())),
            assumption="no thread of the team waits for a CPU when there is one for each",
            evidence=(
                f"The training thread was ready to run and had no CPU for"
                f" {format_share(host.runnable_share)} of the time.",
                f"It ran for {format_share(host.on_cpu_share)} of it.",
                f"Its CPU was taken from it {host.involuntary_per_s:,.0f} times a second, and it gave it up"
                f" {sleeps:,.0f} times, to wait for the others.",
            ),
            fix=f"Give torch {then} thread{'s' if then > 1 else ''}{of}.",
            code=f"torch.set_num_threads({then})",
            actions=self.actions,
        )
