"""What functions that the loop calls between its steps are for, and each of their lines with them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from diagnose.core.phases import Phase
from diagnose.source.blocks import lines_beside
from diagnose.source.function_names import PURPOSES
from diagnose.source.names import words
from diagnose.source.purposes import LOG, PYTHON_LOOP, SAVE, SYNC
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame

LineKey = tuple[Phase, Frame]
Helper = tuple[str, str]
"""File and name of a function that the loop calls between its steps."""

REPORTS = re.compile(r"\bprint\(|\badd_\w+\(|\b(log(ging|ger)?|wandb|mlflow)\.\w+\(", re.IGNORECASE)
"""Logs, rather than writes a file."""

SAVING = {"save", "saves", "saving", "checkpoint", "ckpt", "snapshot", "dump", "keep", "persist", "store"}
"""Words in the names of functions that save the state."""

MOST = 0.5
"""A helper of which a larger part has one purpose is for that as a whole."""


class Helpers:
    """What the helpers of a run are for.

    Args:
        waits: Whether reading a tensor's value waits for a device. Else that is a way to loop over it.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._parts: dict[Helper, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        self._helper_of: dict[LineKey, Helper] = {}

    def add(self, helper: Helper, key: LineKey, idiom: tuple[str, ...], weight_ns: float) -> None:
        """Counts nanoseconds that a line, called from a helper or its own, spent on an idiom."""
        self._parts[helper][idiom] += weight_ns
        self._helper_of[key] = helper

    def served(
        self, by_idiom: Mapping[LineKey, Mapping[tuple[str, ...], float]], sources: Sources
    ) -> dict[LineKey, dict[tuple[str, ...], float]]:
        """Returns those of the helpers' lines that serve to save the state, with that among their idioms.

        Args:
            by_idiom: Nanoseconds of all lines by their idioms.
            sources: The script's.
        """
        counted = {
            key: parts
            for key, parts in by_idiom.items()
            if key[0] is Phase.CHECKPOINT or key in self._helper_of
        }
        saves = _saving(counted, sources)
        found = {}
        for key in self._helper_of:
            file, line, function = key[1]
            beside = saves.get((file, function), ())
            if (beside is None or line in beside) and not REPORTS.search(sources.line(file, line)):
                found[key] = _served(by_idiom[key])
        return found

    def purposes(self) -> dict[LineKey, str]:
        """Returns what the helper is for that calls a line; empty where its lines do not say."""
        of_helper = {helper: _purpose(parts, waits=self._waits) for helper, parts in self._parts.items()}
        return {key: of_helper[helper] for key, helper in self._helper_of.items()}


def _purpose(parts: Mapping[tuple[str, ...], float], *, waits: bool) -> str:
    """Returns what most of a helper's time is for; empty if its lines do not say.

    Args:
        parts: Nanoseconds of its lines by their idioms.
        waits: Whether reading a tensor's value waits for a device. Else that is a way to loop over it.
    """
    of: dict[str, float] = defaultdict(float)
    for idiom, weight_ns in parts.items():
        of[next((each for each in idiom if each in PURPOSES or each == PYTHON_LOOP), "")] += weight_ns
    purpose = max(of, key=of.__getitem__)
    most = of[purpose] > MOST * sum(of.values())
    return purpose if most and not (waits and purpose == PYTHON_LOOP) else ""


def _saving(
    purposes: Mapping[LineKey, Mapping[tuple[str, ...], float]], sources: Sources
) -> dict[Helper, set[int] | None]:
    """Returns file and name of the functions that are there to save the state, and which lines serve that.

    What most of a function's time saves, all of it serves: `None`. A function that is only named for it may
    do something else in each call, and save now and then.
    """
    saving: dict[Helper, float] = defaultdict(float)
    whole: dict[Helper, float] = defaultdict(float)
    lines: dict[Helper, set[int]] = defaultdict(set)
    for (phase, (file, line, function)), parts in purposes.items():
        for idiom, weight_ns in parts.items():
            whole[file, function] += weight_ns
            if phase is Phase.CHECKPOINT or SAVE in idiom:
                saving[file, function] += weight_ns
                lines[file, function].add(line)
    found: dict[Helper, set[int] | None] = {}
    for place, weight_ns in saving.items():
        tree = sources.tree(place[0])
        if weight_ns > MOST * whole[place]:
            found[place] = None
        elif words(place[1].rpartition(".")[2]) & SAVING and tree is not None:
            found[place] = lines_beside(tree, lines[place])
    return found


def _served(parts: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Says of a line beside one that saves the state that it serves that, unless it does something else."""
    served: dict[tuple[str, ...], float] = defaultdict(float)
    for idiom, weight_ns in parts.items():
        others = tuple(each for each in idiom if each not in (SAVE, LOG, PYTHON_LOOP))
        served[(SAVE, *others) if not others or SAVE in idiom else idiom] += weight_ns
    return served


def as_part(purpose: str, idiom: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what a line is for as a part of a helper: what says nothing of its own serves the whole."""
    if not purpose or PURPOSES & set(idiom):
        return idiom
    if purpose == PYTHON_LOOP:
        return (PYTHON_LOOP,) if idiom == (SYNC,) else idiom
    return purpose, *(each for each in idiom if each != PYTHON_LOOP)
