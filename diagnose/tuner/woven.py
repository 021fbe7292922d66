"""Pairs of windows in the same places of two epochs, where epochs are short.

Steps may take longer in one place of an epoch than in another: while workers start, or where long samples
are. Windows elsewhere span whole epochs then, which makes a trial long. Here one epoch is cut into pieces
with the changes off and on in turn, and the next one into the same pieces the other way round. A piece of
both is a pair: the place is the same, and what changes from epoch to epoch hits every second pair the other
way. The first steps of each piece show neither state and are left out, and so is the step that begins an
epoch: what an epoch's beginning takes is in no such pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from diagnose.tuner.agreement import heed_loss, loss_now, switch
from diagnose.tuner.installed import Installed
from diagnose.tuner.paired import HOPELESS, PairedTest, Verdict, window_mean
from diagnose.tuner.windows import MAX_WINDOW_STEPS, WINDOW_NS, WINDOW_STEPS, settle_steps
from diagnose.tuner.world import Plan, Spending, World

MOST_PIECES = 8
"""More of them win little: they share the noise of their two epochs."""

MOST_PAIRS = 48
"""A pair takes an eighth of what one of whole epochs takes, and tells less."""

CLEARLY = 1.5
"""The first two pieces are in different places: a change must be so much worse to be hopeless by them."""

DEAR = 0.5
"""Where switching takes longer than this part of a piece, it is better done once an epoch."""

COMPUTE = ("model", "optimizer")
"""What actions touch that change nothing at the beginning of an epoch, and nothing that lasts longer than a
piece, as queues of batches do."""


class Uneven(Exception):
    """Epochs are not what they seemed, or switching is too dear; the pairs that there are count."""


def can_weave(world: World, changes: Sequence[Installed]) -> bool:
    """Whether epochs are short, and all that is measured works step by step. Ranks may begin their epochs
    at different steps, and would wait for each other for ever."""
    actions = [action for change in changes for action in change.actions]
    return (
        world.ranks.num == 1
        and 1 < world.job.epoch_steps <= MAX_WINDOW_STEPS
        and all(action.touches in COMPUTE and action.period_steps == 1 for action in actions)
        and not any(a.resizes or a.spares_collections or a.frees_memory for a in actions)
    )


def woven(
    world: World, changes: Sequence[Installed], test: PairedTest, spending: Spending, pairs: int = 0
) -> Plan[Verdict | None]:
    """Measures as `measuring.measure` does, by epochs. The changes are left on or off.

    Args:
        pairs: Measure at least so many instead, whatever the test says.

    Raises:
        Uneven: If epochs have other lengths than the last one, too few steps for two pieces, or such in
            which a switch takes too long.
    """
    epoch, settling = world.job.epoch_steps, settle_steps(changes)
    step = yield 1
    for _ in range(epoch + 1):
        if step.begins:
            break
        step = yield 1
    else:
        raise Uneven
    least = max(WINDOW_STEPS, *(action.window_steps for change in changes for action in change.actions))
    test.max_pairs = max(test.max_pairs, MOST_PAIRS)
    pieces = lengths(epoch - 1, settling, max(least, math.ceil(WINDOW_NS / max(1, step.time_ns))))
    while True:
        seen: dict[tuple[int, bool], list[float]] = {}
        for turn in (False, True):
            if turn and not (yield 1).begins:
                raise Uneven
            for place, length in enumerate(pieces):
                on = bool(place % 2) is not turn
                begun = world.clock()
                with spending.charged(world.clock):
                    switch(world, changes, on)
                if world.clock() - begun > DEAR * length * step.time_ns:
                    raise Uneven
                seen[place, on] = yield from _piece(world, length, settling)
                if (place, turn, test.logs, pairs) == (1, False, [], 0):
                    off_ns, on_ns = window_mean(seen[0, False]), window_mean(seen[1, True])
                    if on_ns > CLEARLY * off_ns / HOPELESS:
                        test.add(off_ns, on_ns, pieces[0])
                        spending.spent_ns += max(0.0, on_ns - off_ns) * length
                        if verdict := test.verdict():
                            return verdict
        for place, length in enumerate(pieces):
            # What one of the two also did beside training is left out of both.
            alike = [
                (off, on)
                for off, on in zip(seen[place, False], seen[place, True], strict=True)
                if not math.isnan(off + on)
            ]
            if not alike:
                continue
            off_ns, on_ns = (window_mean(times) for times in zip(*alike, strict=True))
            test.add(off_ns, on_ns, length)
            spending.spent_ns += max(0.0, on_ns - off_ns) * length
        if pairs:
            if len(test.logs) >= pairs:
                return None
        elif verdict := test.verdict():
            return verdict
        if (yield 1).begins:
            continue
        raise Uneven


def lengths(places: int, settling: int, least: int) -> list[int]:
    """Cuts so many places into pieces, an even number of them.

    Args:
        places: Steps of an epoch, its first left out.
        settling: Steps of a piece that do not count.
        least: The fewest that do.

    Raises:
        Uneven: If there is no room for two.
    """
    number = min(MOST_PIECES, places // (settling + least)) // 2 * 2
    if not number:
        raise Uneven
    borders = [places * place // number for place in range(number + 1)]
    return [end - begin for begin, end in pairwise(borders)]


def _piece(world: World, length: int, settling: int) -> Plan[list[float]]:
    """Runs a piece; returns the nanoseconds of each of its steps that counts, NaN for one that also did
    something else. What the device has still to do in the end is spread over them."""
    times: list[float] = []
    for place in range(length):
        if place == settling:
            world.synchronize()
        step = yield 1
        if step.begins:
            raise Uneven
        if place >= settling:
            times.append(math.nan if step.aside else float(step.time_ns))
    begun = world.clock()
    world.synchronize()
    left_ns = world.clock() - begun
    heed_loss([loss_now(world)])
    return [time_ns + left_ns / len(times) for time_ns in times]
