"""What rules about the machine's CPUs share: which time it touches, and how much of it threads divide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diagnose.core.graph import HEAVY_NS
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.rules._compute import shares_of
from diagnose.rules._phases import shared

MIN_HEAVY = 0.25
"""The part of the forward pass that has to be heavy operations."""

USUAL_HEAVY = 0.9
"""The part of forward and backward that such operations are in a model of large products, as those were of
which `DIVISIBLE` was measured: a guess, no reading of them was kept."""

DIVISIBLE = {Phase.FORWARD: 0.75, Phase.BACKWARD: 0.8, Phase.OPTIMIZER: 0.35}
"""The part of a phase that threads divide where operations are heavy, measured likewise: the optimizer is
bound by memory."""

MOST = 0.9
"""No wait for a CPU makes up more of a step than this: some of it is work."""


def spread(profile: Profile, share: float, phases: Iterable[Phase] | None = None) -> dict[Phase, float]:
    """Divides a part of the step among phases, in proportion to their time and at most `MOST` of it.

    Args:
        profile: The run.
        share: Part of the step, 0 to 1.
        phases: Those that it lies in; all by default.
    """
    lies_in = profile.phase_time_ns if phases is None else phases
    return shared(profile, share * profile.step_time_ns, lies_in, most=MOST)


def delayed_share(host: HostStats) -> float:
    """Returns the part of the time that the training thread waits for a CPU, itself or through its team.

    A parallel operation ends when its last thread does, and the others meanwhile spin. So the delays of the
    team's other threads, which are each other's alternatives, come on top of the training thread's own.
    """
    own = host.runnable_share or 0.0
    team = (host.num_threads or 1) - 1
    others = (host.native_delay_share or 0.0) / team if team > 0 else 0.0
    return min(MOST, own + others)


def machine_share(host: HostStats) -> float:
    """Returns the part of the time that a team may have waited because of the machine: for a CPU, and for
    one that other guests of its host had. At most so much, as two threads may wait at once."""
    return min(MOST, delayed_share(host) + (host.stolen_cpus or 0.0))


def heavy_shares(profile: Profile) -> Mapping[Phase, float] | None:
    """Returns which parts of forward and backward are operations that threads divide to some gain; `None`
    if not known.

    Measured on one node after the other of the backward pass. A loop of tiny operations makes a module's
    forward as long as a heavy operation does, and divides as little as they do.
    """
    graph = profile.program.graph
    if graph is None or graph.heavy is None:
        return None
    return shares_of(graph.heavy, graph)


def has_heavy_operations(profile: Profile) -> bool | None:
    """Whether operations of the forward pass take long enough to be divided among threads; `None` if not
    known. Where no operation was timed, a module's forward counts."""
    shares = heavy_shares(profile)
    if shares is not None:
        return shares[Phase.FORWARD] >= MIN_HEAVY
    leaves = profile.settings.num_leaf_modules
    if not leaves or Phase.FORWARD not in profile.phase_time_ns:
        return None
    return profile.phase_time_ns[Phase.FORWARD] / leaves >= HEAVY_NS


def won_by_threads(profile: Profile, now: int, then: int) -> Mapping[Phase, float]:
    """Returns what each phase loses by having `now` threads instead of `then`, where operations are
    heavy."""
    return {
        phase: profile.phase_time_ns[phase] * part * (1 - now / then)
        for phase, part in DIVISIBLE.items()
        if profile.spent_ns(phase) > 0
    }


def stretch_of(profile: Profile) -> float:
    """Returns how many times longer than its CPU time work of the training thread takes: it also waits for
    its turn on a machine that others use. 1 where that was not measured."""
    on_cpu, waits = profile.host.on_cpu_share, profile.host.runnable_share
    if not on_cpu or waits is None:
        return 1.0
    return min(MAX_STRETCH, 1 + waits / on_cpu)


MAX_STRETCH = 4.0
"""A thread that waits longer than that for its turn hardly runs, and its readings say little."""
