"""Workers that keep up and are in the way of training all the same: both want more CPUs than there are."""

from __future__ import annotations

from diagnose.core.profile import Profile
from diagnose.rules._cpus import delayed_share
from diagnose.rules._supply import MIN_SHARE, Supply

MIN_CROWDED = 0.08
"""Part of its time that training (see `delayed_share`), and a worker, must want a CPU in vain; a free
machine has under 1 %, and a machine of which others use a little has less than this."""

FULL = 0.8
"""Part of all CPUs that the process and its workers use where they are in each other's way."""

WORKERS_CPUS = 0.15
"""And CPUs that the workers use of that, on average, and whatever of their work is named; handing over
finished tensors takes less than 0.09.
What they use is not compared with what the training process does: threads of torch's that wait for one
which has no CPU use theirs all the time."""

CROWDED_BOUNDS = (0.4, 1.2)
"""Without its workers' work the training thread also waits less for batches, and has its caches alone."""


def crowded_ns(profile: Profile, supply: Supply) -> float:
    """Returns nanoseconds of each step in which the training thread, or a thread of torch's that it waits
    for, wants a CPU and has none, as its workers compute: they keep up, no more of them than CPUs, and all
    the same they and the model together want all CPUs there are. At most what the workers use of them,
    and 0 where it is not so."""
    delayed, cpus = delayed_share(profile.host), profile.own_cpus
    if not cpus or delayed < MIN_CROWDED or supply.behind:
        return 0.0
    used_ns = supply.loading_cpu_ns + supply.own_cpu_ns
    full = used_ns >= FULL * cpus * supply.training_ns
    if not full or supply.loading_cpu_ns < WORKERS_CPUS * supply.training_ns:
        return 0.0
    # Where there are more of them than CPUs that is the fault, unless nobody knows what fewer would win.
    too_many = supply.loader.num_workers > cpus and (supply.loader.iterable or not supply.crowds_a_team)
    if supply.delay_share < MIN_CROWDED or too_many:
        return 0.0
    return taken_ns(supply, delayed, cpus)


def taken_ns(supply: Supply, delayed: float, cpus: float) -> float:
    """Returns nanoseconds of each step that training would win without its workers, which keep up.

    Args:
        delayed: Part of the time in which it wants a CPU and has none; see `delayed_share`.
        cpus: How many there are.
    """
    most_ns = min(delayed * supply.training_ns, supply.loading_cpu_ns)
    # A team wins at least what they use, divided among its threads, and at most what it spins for them.
    return (most_ns + supply.loading_cpu_ns / cpus) / 2 if supply.crowds_a_team else most_ns


def crowded_by_ns(profile: Profile, supply: Supply, cpu_ns: float) -> float:
    """Returns the part of `crowded_ns` that is due to some of the workers' work: what else they do, such as
    pickling and sending what they made, would go on to take the CPUs. 0 where it is not worth a change.

    Args:
        cpu_ns: The CPU time per step of that work.
    """
    if cpu_ns < WORKERS_CPUS * supply.training_ns:
        return 0.0
    lost_ns = crowded_ns(profile, supply) * min(1.0, cpu_ns / supply.loading_cpu_ns)
    return lost_ns if lost_ns >= MIN_SHARE * supply.step_ns else 0.0
