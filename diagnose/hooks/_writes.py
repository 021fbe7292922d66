"""Which sampled lines were in the midst of writing to gradients, or to copies of the weights, one by one.

Source text names what a loop over weights does only where it is written in a way that is known. But torch
counts the writes to each tensor, `Tensor._version`: where a sample finds some gradients written to and
others not yet, the line that runs then is what writes to them, in whatever words.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from diagnose.core.ledger import BACKWARD, DATA_WAIT, FIRST_GAP, FORWARD, GAP_AFTER, OPTIMIZER
from diagnose.hooks._recorder import Recorder

MOST_TENSORS = 32
"""So many gradients, and so many copies, are looked at: a look reads a number of each, about 0.2 us."""

MOST_LOOKS = 200
"""Looks between the hooks: those of a loop that does the same in each step tell no more after so many."""

MOST_QUIET = 40
"""Looks at copies in which nothing between the hooks runs: they show what is the same after each round."""

SEARCHED_AFTER = 24
MIN_PART = 0.02
"""Samples in which an optimizer has stepped and its loop does something else, and their part of all, before
copies of the weights are looked for: where there are hardly any, nothing there takes long."""

TOLD_EVERY = 80
"""Looks after which what was seen is worked out anew, which takes some milliseconds."""

MIN_TENSORS = 4
"""Fewer that are written to alike are no loop over weights."""

QUIET = (DATA_WAIT, FORWARD, BACKWARD)
"""Slots in which no code of the loop itself runs."""

AFTER_BACKWARD = GAP_AFTER[BACKWARD]
AFTER_OPTIMIZER = GAP_AFTER[OPTIMIZER]

Stack = tuple[int, ...]
Look = tuple[Stack, tuple[int, ...]]
"""A stack, and how often each tensor had been written to; -1 stands for one that is not there."""


class Writes:
    """Looks at the tensors of one training loop while it is sampled.

    Args:
        recorder: Knows its optimizers and models.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._params: list[weakref.ref[Any]] = []
        self._copies: list[weakref.ref[Any]] = []
        self._of_gradients: list[Look] = []
        self._of_copies: list[Look] = []
        self._quiet: list[Look] = []
        self._seen = self._stepped = 0
        self._searched = False
        self._told = 0

    def begin(self) -> None:
        """Notes what is trained. On the training thread, once the optimizers have stepped."""
        trained = list(_trained(self._recorder))
        if len(trained) >= MIN_TENSORS:
            self._params = [weakref.ref(param) for param in _some(trained)]

    def look(self, slot: int, stack: Stack) -> None:
        """Takes a sample in. On the training thread, between any two of its instructions."""
        if not self._params:
            return
        self._seen += 1
        try:
            if slot == AFTER_BACKWARD and len(self._of_gradients) < MOST_LOOKS:
                grads = (param.grad if (param := ref()) is not None else None for ref in self._params)
                self._of_gradients.append((stack, _versions(grads)))
            elif slot >= FIRST_GAP and slot != AFTER_BACKWARD and len(self._of_copies) < MOST_LOOKS:
                self._stepped += slot == AFTER_OPTIMIZER
                if not self._searched and self._stepped >= max(SEARCHED_AFTER, MIN_PART * self._seen):
                    self._search()
                if self._copies:
                    self._of_copies.append((stack, _versions(ref() for ref in self._copies)))
            elif slot in QUIET and self._copies and len(self._quiet) < MOST_QUIET:
                self._quiet.append((stack, _versions(ref() for ref in self._copies)))
        except RuntimeError:  # tensors of an inference count no writes
            self._params = []

    def take(self, *, last: bool) -> list[tuple[Stack, int, int, int]]:
        """Returns of each stack how often it was looked at, and how often in the midst of writing to
        gradients, and to copies; nothing where that is nearly as it was, unless it is the last time. For
        the flusher's thread."""
        of_gradients, of_copies = list(self._of_gradients), list(self._of_copies)
        looks = len(of_gradients) + len(of_copies)
        if looks < self._told + (1 if last else TOLD_EVERY):
            return []
        self._told = looks
        found: dict[Stack, list[int]] = defaultdict(lambda: [0, 0, 0])
        midst = (fresh_midst(of_gradients), grown_midst(of_copies, list(self._quiet)))
        for kind, (told, is_midst) in enumerate(zip((of_gradients, of_copies), midst, strict=True), 1):
            for (stack, _), within in zip(told, is_midst, strict=True):
                found[stack][0] += 1
                found[stack][kind] += within
        return [(stack, looks, gradients, copies) for stack, (looks, gradients, copies) in found.items()]

    def _search(self) -> None:
        """Looks for tensors that are shaped as weights are, and are none: all that Python knows is gone
        through once, which took 50 ms of 290,000 objects. In the training thread: what was let go of
        meanwhile is deleted where it would have been."""
        self._searched = True
        try:
            self._copies = [weakref.ref(copy) for copy in _some(list(_copies(self._recorder)))]
        except RuntimeError:  # the optimizer's state became larger meanwhile, or a tensor has no address
            self._copies = []
        if len(self._copies) < MIN_TENSORS:
            self._copies = []


def fresh_midst(looks: Sequence[Look]) -> list[bool]:
    """Returns at which looks some gradients had been written to and others not.

    They are made anew in each backward pass: where the counts only grow nothing is told.
    """
    totals = [sum(seen) for _, seen in looks]
    if totals == sorted(totals):
        return [False] * len(looks)
    columns = _columns(looks)
    return _ragged(looks, [min(column) for column in columns], columns)


def grown_midst(looks: Sequence[Look], quiet: Sequence[Look]) -> list[bool]:
    """Returns at which looks some copies had been written to and others not, in this turn.

    Args:
        looks: Their counts grow from step to step.
        quiet: Looks at which no turn was under way: by how many counts two tensors differ there, they
            differ after each.
    """
    if not quiet:
        return [False] * len(looks)
    columns = _columns(quiet)
    usual = [Counter(_from_first(column, quiet)).most_common(1)[0][0] for column in columns]
    return _ragged(looks, usual, columns)


def _from_first(column: Sequence[int], looks: Sequence[Look]) -> list[int]:
    return [count - seen[0] for count, (_, seen) in zip(column, looks, strict=True)]


def _columns(looks: Sequence[Look]) -> list[tuple[int, ...]]:
    """Returns the counts of each tensor."""
    return list(zip(*(seen for _, seen in looks), strict=True))


def _ragged(looks: Sequence[Look], usual: Sequence[int], columns: Sequence[Sequence[int]]) -> list[bool]:
    """Returns at which looks the counts of tensors that are written to equally often are neither the usual
    ones, nor as many more for all.

    Args:
        looks: The looks.
        usual: What is usual of each tensor.
        columns: Counts of each tensor by which it is told how often it is written to.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, column in enumerate(columns):
        if min(column) >= 0:
            groups[max(column) - min(column)].append(index)
    alike = [group for span, group in groups.items() if span and len(group) >= MIN_TENSORS]
    return [any(len({seen[i] - usual[i] for i in group}) > 1 for group in alike) for _, seen in looks]


def _versions(tensors: Iterable[Any]) -> tuple[int, ...]:
    return tuple(-1 if tensor is None else tensor._version for tensor in tensors)


def _some(tensors: list[Any]) -> list[Any]:
    """Returns so many that a look at all of them is cheap, from all places of the list."""
    return tensors[:: -(-len(tensors) // MOST_TENSORS) or 1]


def _trained(recorder: Recorder) -> Iterable[Any]:
    for optimizer in recorder.met.live_optimizers():
        for group in optimizer.param_groups:
            yield from (param for param in group["params"] if param.requires_grad)


def _copies(recorder: Recorder) -> Iterable[Any]:
    """Yields plain tensors of the shapes of weights that live on from step to step: no weights, gradients,
    buffers, or state of an optimizer."""
    import torch

    trained = list(_trained(recorder))
    shapes = {param.shape for param in trained if param.dim()}
    known = {id(each) for param in trained for each in (param, param.grad)}
    places = {param.data_ptr() for param in trained}
    for model in recorder.met.live_modules():
        known.update(map(id, (*model.parameters(), *model.buffers())))
    for optimizer in recorder.met.live_optimizers():
        known.update(id(each) for state in optimizer.state.values() for each in state.values())
    plain = {torch.Tensor, torch.nn.Parameter}
    # By their types alone: a proxy's `__class__` may be code of the script's.
    for each in [each for each in gc.get_objects() if type(each) in plain]:
        if id(each) in known or each.shape not in shapes or not each.is_floating_point():
            continue
        if each.grad_fn is None and each.data_ptr() not in places:
            yield each
