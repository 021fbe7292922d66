"""How the ranks of a job decide alike: each runs the same plan, and what a decision rests on is exchanged.

Nobody leads. Between two exchanges nothing is changed, so that all ranks have the same changes in force
at every moment, also when an exchange fails and each of them stops where it is.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from diagnose.actions.base import CannotApply, NotYet
from diagnose.core.errors import is_short_of_memory
from diagnose.core.units import NS_PER_MS
from diagnose.tuner.installed import Installed
from diagnose.tuner.loss_trend import LossAlarm

if TYPE_CHECKING:
    from diagnose.tuner.world import Plan, World

POLL_NS = 500 * NS_PER_MS
MAX_POLL_STEPS = 500
"""Ranks that wait for a time or a process ask each other about so often: an exchange takes 1 to 5 ms."""

POLL_ALONE_NS = 20 * NS_PER_MS
"""A process that is alone asks itself so often, or after each step: nothing is so urgent."""

DONE, REFUSED, NOT_YET, FAILED = "done", "refused", "not yet", "failed"


class RanksLost(Exception):
    """The ranks cannot decide together any more; the message says why, in words for the user."""


class RankFailed(Exception):
    """Something of ours failed on a rank, and every rank knows it."""


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def num(self) -> int:
        """How many there are; 1 as long as this process knows of no other."""

    def exchange(self, about: str, value: Any, *, dear: bool = False) -> list[Any]:
        """Returns every rank's value, in the order of ranks: all ranks get them, or none does.

        Args:
            about: What is exchanged, in words; the same on every rank.
            value: JSON's types only.
            dear: Whether some rank may come to this much later than another, having done something long.

        Raises:
            RanksLost: If a rank did not come in time, or came with something else. Ever after, too.
        """

    def leave(self, reason: str) -> None:
        """Takes no part any more: the others learn why at their next exchange. Does not wait."""


class Alone:
    """A job of one process."""

    rank = 0
    num = 1

    def exchange(self, about: str, value: Any, *, dear: bool = False) -> list[Any]:
        return [value]

    def leave(self, reason: str) -> None:
        """See `Ranks`."""


def together(
    world: World, about: str, work: Callable[[], Any], *, dear: bool = False, back: bool = False
) -> list[Any]:
    """Does something on every rank at the same step; what is raised on one is raised on all.

    Args:
        about: What is done, in words.
        work: Does it; returns JSON's types only.
        dear: See `Ranks.exchange`. Such work is done `apart`.
        back: Whether it takes something back: then it cannot be left undone for lack of memory.

    Returns:
        What `work` returned on each rank.

    Raises:
        CannotApply: If some rank refuses, or has too little memory; says which, unless all refuse for the
            same reason. `NotYet` if none refuses for good.
        RankFailed: If some rank raised anything else.
        RanksLost: See `Ranks.exchange`.
    """
    ranks = world.ranks
    if ranks.num == 1:
        return [_done(world, work, dear, back)]
    try:
        outcome = [DONE, _done(world, work, dear, back)]
    except CannotApply as refusal:
        outcome = [NOT_YET if isinstance(refusal, NotYet) else REFUSED, str(refusal)]
    except Exception:  # noqa: BLE001 (what fails on one rank ends the tuning on all)
        outcome = [FAILED, traceback.format_exc(limit=-4).strip()]
    outcomes = ranks.exchange(about, outcome, dear=dear)
    for kind, error in ((FAILED, RankFailed), (REFUSED, CannotApply), (NOT_YET, NotYet)):
        said = {rank: text for rank, (told, text) in enumerate(outcomes) if told == kind}
        if said:
            raise error(whose(said, ranks.num))
    return [result for _, result in outcomes]


def _done(world: World, work: Callable[[], Any], dear: bool, back: bool) -> Any:
    try:
        return apart(world, work) if dear else work()
    except Exception as error:
        if back or not is_short_of_memory(error):
            raise
    # Outside of that, as the error's frames hold what there was hardly room for.
    raise CannotApply("there is too little memory to try it")


def apart(world: World, work: Callable[[], Any]) -> Any:
    """Does something while the device does nothing for the script, which may use another stream for its
    steps than for what is between them."""
    world.synchronize()
    try:
        with world.uncounted():
            return work()
    finally:
        world.synchronize()


def whose(said: dict[int, str], num_ranks: int) -> str:
    """What ranks said, with their numbers unless all said the same."""
    texts = list(dict.fromkeys(said.values()))
    if len(said) == num_ranks and len(texts) == 1:
        return texts[0]
    return "; ".join(
        f"rank {', '.join(str(rank) for rank, other in said.items() if other == text)}: {text}"
        for text in texts
    )


def until(
    world: World, about: str, holds: Callable[[], bool], disturbed: Callable[[], bool] = lambda: False
) -> Plan[bool]:
    """Lets steps pass until something holds on every rank, or one of them is disturbed.

    Returns:
        Whether it holds; the same on every rank.

    Raises:
        LossAlarm: See `heed_loss`.
    """
    steps, begun = 0, world.clock()
    while True:
        told = world.ranks.exchange(about, [holds(), world.clock() - begun, disturbed(), loss_now(world)])
        heed_loss([loss for *_, loss in told])
        held = all(held for held, *_ in told)
        if held or any(stop for _, _, stop, _ in told):
            return held
        slowest_ns = max(took_ns for _, took_ns, *_ in told)
        if not steps:
            steps = 1
        else:
            poll_ns = POLL_ALONE_NS if world.ranks.num == 1 else POLL_NS
            wanted = math.ceil(steps * poll_ns / max(slowest_ns, 1))
            steps = min(max(1, wanted), 2 * steps, MAX_POLL_STEPS)
        begun = world.clock()
        yield from rest(steps, lambda: world.ranks.num == 1 and disturbed())


def rest(steps: int, disturbed: Callable[[], bool]) -> Plan[None]:
    """Lets so many steps pass, or fewer where one ends with a disturbance."""
    while steps > 0:
        steps -= (yield steps).passed
        if disturbed():
            return


def loss_now(world: World) -> list[Any]:
    """What this rank says of the loss, for an exchange that is due anyway."""
    return [world.loss.alarm, world.loss.fatal]


def heed_loss(told: Sequence[list[Any]]) -> None:
    """Raises `LossAlarm` on every rank if one of them has said so."""
    said = {rank: alarm for rank, (alarm, _) in enumerate(told) if alarm}
    if said:
        raise LossAlarm(whose(said, len(told)), any(fatal for _, fatal in told))


def switch(world: World, changes: Sequence[Installed], on: bool) -> None:
    """Puts changes in force on every rank, or takes them back.

    Raises:
        CannotApply, RanksLost: See `together`; then they are as they were.
        RankFailed: See `together`.
    """
    before = [change.on for change in changes]

    def work() -> None:
        for change in changes if on else reversed(changes):
            if change.action.spares_collections:
                world.pauses.spare(on)
            change.switch(on)

    names = ", ".join(change.name for change in changes)
    try:
        about = f"switching {names} {'on' if on else 'off'}"
        together(world, about, lambda: apart(world, work), back=not on)
    except (CannotApply, RanksLost):
        # Back to what all ranks last knew of each other.
        for change, was in zip(changes, before, strict=True):
            with suppress(CannotApply):  # one that is over must not keep the others from it
                change.switch(was)
        raise
