"""What the loop itself does for its batches, line by line, and in which steps"""

from __future__ import annotations

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._lines import MIN_SAMPLES, part_of
from diagnose.rules.slow_rollout import is_rollout

AS_MUCH = 0.7
"""Samples tell a time that fell into a few steps to a third or so; see `between_epochs`."""

HALF = 0.5
"""Of the time of the lines that make batches, without a loader; the rest may be what each step slices.
Then the code that serves neither batch nor model has to be too little to explain it."""

CLEARLY = 0.8
"""Of the largest of these lines: if the rest takes less, that line passes at the beginning of epochs."""


def making(profile: Profile) -> list[SourceLine]:
    """Returns the lines that serve to make batches and neither wait nor step an environment."""
    return [
        line
        for line in profile.where
        if line.phase is Phase.DATA_WAIT
        and not (line.in_worker or is_rollout(line))
        and "wait" not in line.idiom
    ]


def between_epochs(profile: Profile) -> tuple[float, tuple[SourceLine, ...]]:
    """Returns how long the loop itself makes an epoch ready, per step and at least, and in which lines.

    A usual step spends its time between hooked calls on something else, or on its batch: what these lines
    take beyond all of that passes in the steps that begin an epoch, which are so much longer there. So does
    what these steps take beyond the others, but for all that lines took anywhere which serve neither batch
    nor model; a loss that is computed in each step makes none of them longer. Without a loader, steps that
    come regularly begin an epoch, if they are as much longer, in all, as these lines take, or if that can
    hardly be anything else.
    """
    stats, is_fed = profile.input, bool(profile.program.loaders)
    lines = tuple(
        own_part(line) if is_fed else line for line in making(profile) if line.between or not is_fed
    )
    if stats.epoch_start_gap_ns is None or stats.steady_gap_ns is None:
        return 0.0, ()
    if sum(line.num_samples for line in lines) < MIN_SAMPLES:
        return 0.0, ()
    seen_ns = sum(line.share for line in lines) * profile.step_time_ns
    start_ns, others_ns = stats.epoch_start_gap_ns, profile.spent_ns(Phase.OTHER)
    if is_fed:
        least_ns = seen_ns - stats.steady_gap_ns
        # Else something else begins the epoch, such as targets of a loss.
        if AS_MUCH * seen_ns <= start_ns <= seen_ns / AS_MUCH:
            least_ns = max(least_ns, start_ns - others_ns)
        return max(0.0, min(start_ns, seen_ns, least_ns)), lines
    alike = start_ns >= AS_MUCH * seen_ns
    largest_ns = max(line.share for line in lines) * profile.step_time_ns
    if CLEARLY * largest_ns > seen_ns - start_ns:  # else it may be what each step slices
        alike = alike or (start_ns >= HALF * seen_ns and start_ns - others_ns >= AS_MUCH * start_ns)
    return (min(seen_ns, start_ns), lines) if alike and start_ns <= seen_ns / AS_MUCH else (0.0, ())


def own_part(line: SourceLine) -> SourceLine:
    """What of a line's time passed in the loop, not in its loader."""
    return part_of(line, line.between)


def takes_batch(line: SourceLine) -> bool:
    """Whether a line asks a loader for its batch: that time is the loader's."""
    return line.trains or line.text.startswith(("for ", "while ")) or "next(" in line.text


def least_wait_ns(profile: Profile) -> float:
    """Returns what each rank spends on its batches: what one alone does beyond makes it a straggler."""
    times = [rank.phase_time_ns.get(Phase.DATA_WAIT, 0.0) for rank in profile.ranks]
    return min([profile.spent_ns(Phase.DATA_WAIT), *times])
