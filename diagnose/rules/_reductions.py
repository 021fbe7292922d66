"""How gradients are reduced over the ranks, by DDP or by the loop itself, and how long ranks wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

from diagnose.analysis.lateness import WAITS
from diagnose.core.parallel import Averaging, Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.source.calls import with_arguments

MIN_TIMED = 5
"""Of fewer timed passes the quickest may still be a slow one."""

BUCKET_BYTES = 25 * 2**20
"""What DDP puts into a bucket by itself."""

DDP_PLAIN = "DistributedDataParallel(model)"


def made_without(ddp: Ddp, argument: str) -> str:
    """Returns the script's own call of `DistributedDataParallel` without an argument."""
    without: dict[str, None] = {argument: None}
    call = with_arguments(ddp.call, "", **without) if ddp.call else ""
    return call if call and not call.startswith("(") else DDP_PLAIN


def waits_in(profile: Profile) -> tuple[Phase, ...]:
    """Returns the phases in which a rank waits for the others."""
    program = profile.program
    known = program.meetings is not None or program.gatherings is not None
    return (Phase.COMMUNICATION,) if known else WAITS


def reduces_in(profile: Profile) -> Phase:
    """Returns the phase that holds what a backward pass waits for gradients on their way."""
    return waits_in(profile)[0]


def steady_wait_ns(ddp: Sequence[Ddp], but: Collection[int] = ()) -> float | None:
    """Returns how long ranks wait for gradients in the quickest of the passes that DDP itself timed.

    A busy machine makes now this rank wait and now that one, and in some passes hardly any: what is there
    in every pass, on every rank, is not its doing. For a slow link, in every pass but one: a rank that
    loses its CPU in the middle of a pass finds all gradients there when it goes on.

    Args:
        ddp: All ranks.
        but: Ranks that are left out: those that the others wait for.

    Returns:
        `None` if too few passes were timed.
    """
    least = _least_waits_ns([one for one in ddp if one.rank not in but])
    return None if least is None else sorted(least)[0 if but else 1]


def usual_wait_ns(profile: Profile) -> float | None:
    """Returns how long ranks wait for gradients in a usual pass: the rank that waits least, which was the
    last to come and waits for no other. `None` if too few passes were timed."""
    ddp, meetings = profile.program.ddp, profile.program.meetings
    if meetings is not None:
        return meetings.calm_ns / (ddp[0].synced_passes or 1.0)
    least = _least_waits_ns(ddp)
    return None if least is None else median(least)


def _least_waits_ns(ddp: Sequence[Ddp]) -> list[float] | None:
    """Returns what the rank that waits least waits in each pass that DDP timed on all of these; `None` if
    these are too few."""
    waits = [one.exposed_ns_by_pass for one in ddp]
    common = set(waits[0]).intersection(*waits[1:]) if waits else set()
    return [min(wait[i] for wait in waits) for i in common] if len(common) >= MIN_TIMED else None


def by_hand(profile: Profile) -> Averaging | None:
    """Returns how a loop averages its gradients itself; `None` where another does, or nobody."""
    program = profile.program
    averaging = program.averaging
    if program.ddp or program.fsdp is not None or averaging is None or not averaging.is_of_gradients:
        return None
    return averaging


def averaging_by_hand_ns(profile: Profile) -> float | None:
    """Returns nanoseconds per step in which every rank averages its gradients by hand, once for each pass:
    what is added up besides is something else, but for what is inside of a pass or of the optimizer's step:
    that is none of the loop's. `None` where it does and that is not known."""
    averaging = by_hand(profile)
    if averaging is None:
        return 0.0
    times = [rank.averaged_ns for rank in profile.ranks]
    known = [ns for ns in times if ns is not None]
    if len(known) < len(times):
        return None
    part = 1.0 if averaging.inside else min(1.0, max(1.0, averaging.passes) / averaging.times)
    return min(known) * part


def waits_ns(profile: Profile, rank: RankProfile) -> float | None:
    """Returns how long a rank's backward passes of a step go on when its own gradients are all there.

    `None` without DDP's timers, nor ours of each pass.
    """
    meetings = profile.program.meetings
    if meetings is not None:
        return meetings.wait_ns.get(rank.rank)
    timed = next((ddp for ddp in profile.program.ddp if ddp.rank == rank.rank), None)
    if timed is None or timed.compute_ns is None:
        return None
    return max(0.0, rank.own_ns(Phase.BACKWARD) - (timed.passes_per_step or 1.0) * timed.compute_ns)
