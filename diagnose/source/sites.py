"""The lines of the script from which hooks were entered, straight or through functions that lines call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diagnose.core.ledger import SLOT_OF
from diagnose.core.places import decoded
from diagnose.source.rollouts import measures

Frame = tuple[str, int, str]
"""File, line, function."""
Line = tuple[str, int]
"""File and line."""
Stack = Sequence[Frame]
"""The user's frames of a sample, innermost first."""
Site = tuple[str, str, int, str, int]
"""Kind, file, line, function, calls. The kind: `next`, `forward`, `further`, `backward`, `optimizer` or
`schedule`."""
Sample = tuple[int, int, Stack, int]
"""First step, slot and place, a package's frame and then the user's, nanoseconds, as the store has them."""

SCHEDULE_SITE = "schedule"
"""A learning-rate schedule of torch's is stepped there, which says nothing of phases."""

KIND_OF_SLOT = {SLOT_OF["forward"]: "forward", SLOT_OF["backward"]: "backward"}


def anchors_of(sites: Iterable[Site], samples: Iterable[Sample]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns all that the roles of lines depend on besides the sources; on most ranks it is the same.

    Of what passes without gradients it is the functions alone: in which of their lines a sample fell is
    chance, and would be another on each rank.
    """
    straight, samples = by_place(sites), list(samples)
    kinds = frozenset((line, kind) for line, kinds in straight.items() for kind in kinds)
    acting = ((file, function) for file, _, function in without_gradients(samples))
    seen = (*callers_of(straight, samples), *files_of(samples), *acting)
    return kinds, frozenset(seen)


def without_gradients(samples: Iterable[Sample]) -> set[Frame]:
    """Returns the frames through which models are called without gradients, but to measure what was
    learned; not those inside of a model, of a `forward` and what it calls."""
    evaluation = SLOT_OF["evaluation"]
    found: set[Frame] = set()
    for _, slot, (_, *stack), _ in samples:
        if decoded(slot)[0] == evaluation and not measures(function for _, _, function in stack):
            names = [function.rpartition(".")[2] for _, _, function in stack]
            inside = (i for i, name in enumerate(names, 1) if name == "forward")
            found.update(stack[max(inside, default=0) :])
    return found


def files_of(samples: Iterable[Sample]) -> set[str]:
    """Returns the files of the script in which time was spent."""
    return {file for _, _, (_, *stack), _ in samples for file, _, _ in stack}


def by_place(sites: Iterable[Site]) -> dict[Line, set[str]]:
    """Returns what kinds of calls were made from each file and line, but for steps of schedules."""
    kinds = _kinds(site for site in sites if site[0] != SCHEDULE_SITE)
    return {place: one_call(found) for place, found in kinds.items()}


def schedules_of(sites: Iterable[Site]) -> set[Line]:
    """Returns file and line from which schedules are stepped, and nothing else that trains."""
    return {place for place, found in _kinds(sites).items() if found == {SCHEDULE_SITE}}


def _kinds(sites: Iterable[Site]) -> dict[Line, set[str]]:
    kinds: dict[Line, set[str]] = {}
    for kind, file, line, _, _ in sites:
        kinds.setdefault((file, line), set()).add(kind)
    return kinds


def one_call(kinds: set[str]) -> set[str]:
    """Where one of several model calls is of a batch, or one sometimes is, the others do not count."""
    return kinds - {"further"} if "forward" in kinds else kinds


def callers_of(
    straight: Mapping[Line, set[str]], samples: Iterable[Sample]
) -> set[tuple[str, int, str, str]]:
    """Returns the lines that call, at some remove, a function that calls a model or begins a backward, and
    what it is that they call."""
    callers: set[tuple[str, int, str, str]] = set()
    for _, slot, (_, *stack), _ in samples:
        kind = KIND_OF_SLOT.get(decoded(slot)[0])
        if kind is not None:
            wanted = {kind, "further"} if kind == "forward" else {kind}
            depths = (
                i for i, (file, line, _) in enumerate(stack) if wanted & straight.get((file, line), set())
            )
            for depth in range(next(depths, len(stack)) + 1, len(stack)):
                file, line, _ = stack[depth]
                callers.add((file, line, kind, stack[depth - 1][2].rpartition(".")[2]))
    return callers
