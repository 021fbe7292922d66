"""What a loader's sampler does when it is asked ahead of the loop."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import RandomSampler

from diagnose.actions._loader_parts import Signature, signature, without_streams
from diagnose.actions._loader_purity import iterators
from diagnose.hooks._drawing import moved, random_states

PASS_S = 0.5
"""So long indices are drawn of a sampler that is not torch's, to follow it to the end of an epoch. What the
first one takes is left out, and what looks take."""

FEWEST_LOOKS = 4
LOOKS_S = 0.1
"""So many looks are taken at the sampler itself, and more of them for so long: with a table in it each may
take as long as all the indices."""

CLOSELY = 64
"""With so many indices at the beginning of an epoch, and before its end, generators of the process are
compared each time; between them with one of so many."""

followed: set[type] = set()
"""Classes of samplers that were followed to the end of an epoch, and left the process's generators alone:
only those are asked ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What a sampler did when it was asked ahead.

    Attributes:
        first: The first indices, two at most.
        drew: See `Probed.sampler_drew`.
        changed: See `Probed.sampler_changed`.
        goes_on: See `Probed.sampler_goes_on`.
    """

    first: tuple[Any, ...] = ()
    drew: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    goes_on: bool = False


def look_ahead(batches: Any) -> Foreseen:
    """Draws from the child's copy of the sampler what comes next; of one that is not torch's a whole epoch,
    too."""
    sampler = batches._index_sampler
    of_torch = not_torchs(sampler) is None
    rest = _follow(sampler, batches._sampler_iter, length(sampler), of_torch, is_rest=True)
    if rest.drew or rest.changed or (of_torch and len(rest.first) > 1):
        return rest
    held = [] if of_torch else iterators(sampler)
    epoch = _follow(sampler, iter(sampler), length(sampler), of_torch)
    # One that was not begun anew with the epoch goes on from where the last index was drawn.
    still = set(map(id, iterators(sampler))) if held else set()
    places = tuple(type(each).__name__ for each in held if id(each) in still)
    return replace(epoch, first=(*rest.first, *epoch.first)[:2], changed=epoch.changed or places)


def _follow(
    sampler: Any, indices: Any, known: int | None, of_torch: bool, *, is_rest: bool = False
) -> Foreseen:
    """Draws indices to the end of an epoch, or as long as there is time.

    Args:
        indices: Its iterator for this epoch.
        known: How many there are in an epoch, if the sampler tells. Nobody draws beyond them early.
        of_torch: Whether a few will do.
        is_rest: Whether some have been drawn of this epoch: a few will do, too.
    """
    first: list[Any] = []
    states: dict[str, int] = {}
    parts: list[Signature] = []
    number, looks_s, until = 0, 0.0, math.inf
    most = CLOSELY if of_torch or is_rest else known
    while (most is None or number < most) and time.perf_counter() < until:
        index = next(indices, END)
        if not number:
            until = time.perf_counter() + PASS_S
        if index is END:
            closely = known is None or (number < known and not is_rest)
        else:
            near_end = known is not None and known - number <= CLOSELY
            closely = number < CLOSELY or not number % CLOSELY or near_end
        if closely:
            now = random_states()
            # The first draw may seed the epoch.
            if states and (drew := moved(states, now)):
                return Foreseen(first=tuple(first), drew=drew)
            states = now
        if index is END:
            return Foreseen(first=tuple(first))
        # What it does with the last index is put off: no look is compared before another one follows.
        if len(parts) > 1 and (changed := moved(*parts)):
            names = tuple(".".join(path) or "the sampler" for path in changed)
            return Foreseen(first=tuple(first), changed=names)
        begun = time.perf_counter()
        looks = not of_torch and (number < FEWEST_LOOKS or looks_s < LOOKS_S)
        parts = [*parts[-1:], without_streams(signature(sampler))] if looks else []
        took_s = time.perf_counter() - begun
        looks_s, until = looks_s + took_s, until + took_s
        if number < 2:
            first.append(own_index(index))
        number += 1
    return Foreseen(first=tuple(first), goes_on=not of_torch and number != most)


END = object()


def own_index(index: Any) -> Any:
    """Returns a copy: a sampler may fill one list, or one tensor, anew for each batch."""
    plain = type(index) is list and set(map(type, index)) <= {int}
    return index.copy() if plain else copy.deepcopy(index)


def length(of: Any) -> int | None:
    """Returns how many batches an epoch has, `None` if the sampler, or the loader, does not tell."""
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return None


def not_torchs(sampler: Any) -> Any:
    """Returns the sampler that decides on the order, if it is not torch's own.

    torch's keep no place in themselves, and draw from a generator that they are given with the first index
    of an epoch and the last. One that draws from it in between, too, counts as the script's own.
    """
    while type(sampler).__module__.startswith("torch.utils.data"):
        generator = getattr(sampler, "generator", None)
        draws_on = getattr(sampler, "replacement", False) is True or _begins_again(sampler)
        if (draws_on and generator is not None) or generator is torch.default_generator:
            return sampler
        if not hasattr(sampler, "sampler"):
            return None
        sampler = sampler.sampler
    return sampler


def _begins_again(sampler: Any) -> bool:
    """Whether it shuffles anew in the middle of an epoch, which is longer than the dataset."""
    return isinstance(sampler, RandomSampler) and sampler.num_samples > len(sampler.data_source)
