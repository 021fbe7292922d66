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
import statistics
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
"""What actions touch that are steady: nothing of them outlasts a piece, as queues of batches do."""


class Uneven(Exception):
    """Epochs are not what they seemed, or switching is too dear; the pairs that there are count."""


def can_weave(world: World, changes: Sequence[Installed]) -> bool:
    """Whether epochs are short, and all that is measured works step by step. Ranks may begin their epochs
    at different steps, and would wait for each other for ever."""
    actions = [action for change in changes for action in change.actions]
    return (
        world.ranks.num == 1
        and 1 < world.job.epoch_steps <= MAX_WINDOW_STEPS
        and all(action.steady or action.touches in COMPUTE for action in actions)
        and all(action.period_steps == 1 for action in actions)
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
    most, test.max_pairs = test.max_pairs, max(test.max_pairs, MOST_PAIRS)
    try:
        weave = yield from _begun(world, changes, test, spending)
        while True:
            found = yield from weave.two_epochs(may_end=not pairs)
            if pairs and len(test.logs) >= pairs:
                return None
            if found and not pairs:
                return found
            yield from weave.beginning()
    except Uneven:
        test.max_pairs = most
        raise


def _begun(
    world: World, changes: Sequence[Installed], test: PairedTest, spending: Spending
) -> Plan[_Weave]:
    """Waits for the beginning of an epoch, and cuts it by what the steps until then took."""
    epoch, usual_ns = world.job.epoch_steps, math.inf
    for _ in range(2 * epoch):
        step = yield 1
        if not step.begins:
            usual_ns = min(usual_ns, max(1, step.time_ns))
        elif usual_ns < math.inf:
            break
    else:
        raise Uneven
    actions = [action for change in changes for action in change.actions]
    least = max(WINDOW_STEPS, math.ceil(WINDOW_NS / usual_ns), *(action.window_steps for action in actions))
    settling = settle_steps(changes)
    pieces = lengths(epoch - 1, settling, least)
    return _Weave(world, changes, test, spending, pieces, settling, DEAR * pieces[0] * usual_ns)


class _Weave:
    """What is measured, piece by piece, from the end of an epoch's first step on.

    Args:
        pieces: Steps of each.
        settling: Leading ones that do not count.
        dear_ns: What a switch takes at most.
    """

    def __init__(
        self,
        world: World,
        changes: Sequence[Installed],
        test: PairedTest,
        spending: Spending,
        pieces: list[int],
        settling: int,
        dear_ns: float,
    ) -> None:
        self._world, self._changes = world, changes
        self._test, self._spending = test, spending
        self._pieces, self._settling, self._dear_ns = pieces, settling, dear_ns

    def beginning(self) -> Plan[None]:
        """Lets the step pass that begins an epoch."""
        step = yield 1
        if not step.begins:
            raise Uneven

    def two_epochs(self, *, may_end: bool) -> Plan[Verdict | None]:
        """Gives the test a pair for each piece; returns what it says then.

        Args:
            may_end: Whether two pieces alone may tell that the changes are hopeless.
        """
        seen: dict[tuple[int, bool], list[float]] = {}
        for turn in (False, True):
            if turn:
                yield from self.beginning()
            for place, length in enumerate(self._pieces):
                on = bool(place % 2) is not turn
                self._switch(on)
                seen[place, on] = yield from self._piece(length)
                if may_end and not self._test.logs and (place, turn) == (1, False):
                    without, with_ = seen[0, False], seen[1, True]
                    if statistics.fmean(with_) > CLEARLY * statistics.fmean(without) / HOPELESS:
                        self._add(without, with_)
                        return self._test.verdict()
        for place in range(len(self._pieces)):
            self._add(seen[place, False], seen[place, True])
        return self._test.verdict()

    def _switch(self, on: bool) -> None:
        begun = self._world.clock()
        with self._spending.charged(self._world.clock):
            switch(self._world, self._changes, on)
        if self._world.clock() - begun > self._dear_ns:
            raise Uneven

    def _piece(self, length: int) -> Plan[list[float]]:
        """Runs a piece; returns the nanoseconds of each step that counts, NaN for one that also did
        something else. What the device has still to do in the end is spread over them."""
        world, times = self._world, []
        for place in range(length):
            if place == self._settling:
                world.synchronize()
            step = yield 1
            if step.begins:
                raise Uneven
            if place >= self._settling:
                times.append(math.nan if step.aside else float(step.time_ns))
        begun = world.clock()
        world.synchronize()
        left_ns = world.clock() - begun
        heed_loss([loss_now(world)])
        return [time_ns + left_ns / len(times) for time_ns in times]

    def _add(self, without: list[float], with_: list[float]) -> None:
        """Adds a pair; what one of the two also did beside training is left out of both."""
        steps = min(len(without), len(with_))
        alike = [
            pair for pair in zip(without[:steps], with_[:steps], strict=True) if not math.isnan(sum(pair))
        ]
        if alike:
            without_ns, with_ns = (window_mean(times) for times in zip(*alike, strict=True))
            self._test.add(without_ns, with_ns, steps)
            self._spending.spent_ns += max(0.0, with_ns - without_ns) * steps


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
