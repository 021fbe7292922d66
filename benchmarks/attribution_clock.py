"""The script's own clock, and the time that it wastes where it is told to."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

from torch.utils.data import get_worker_info


class Clock:
    """What each step took, by phase and by fault, in nanoseconds.

    Attributes:
        phases: Of each step, the time of each phase.
        faults: Of each step, the time of each fault, and of each stage of loading a batch.
        in_workers: File to which worker processes write theirs.
    """

    def __init__(self) -> None:
        self.phases: list[dict[str, int]] = []
        self.faults: list[dict[str, int]] = []
        self.in_workers: Path | None = None
        self._last = 0

    def start(self) -> None:
        """The first step begins. All that exists by now, most of it torch, is no work for the collector."""
        gc.collect()
        gc.freeze()
        self.phases.append(defaultdict(int))
        self.faults.append(defaultdict(int))
        self._last = perf_counter_ns()

    def lap(self, phase: str) -> None:
        """Charges the time since the last lap to a phase."""
        now = perf_counter_ns()
        self.phases[-1][phase] += now - self._last
        self._last = now

    def next_step(self) -> None:
        """The loop is about to ask for its next batch."""
        self.lap("other")
        self.phases.append(defaultdict(int))
        self.faults.append(defaultdict(int))

    def spent(self, place: str, begun_ns: int) -> None:
        """A fault, or a stage of loading, is over. Those of before the first step are nobody's."""
        elapsed_ns = perf_counter_ns() - begun_ns
        if self.in_workers is not None and get_worker_info() is not None:
            with self.in_workers.open("a") as file:
                file.write(f"{place} {elapsed_ns}\n")
        elif self.faults:
            self.faults[-1][place] += elapsed_ns


clock = Clock()
asked_for: dict[str, tuple[str, int]] = {}
"""Kind and nanoseconds of each fault asked for, by place."""


def fault(place: str) -> Iterable[Any]:
    """Returns what takes the time asked for at a place when it is iterated, then notes how long that was.

    All of it runs in C, so the time goes to the line that iterates: in a busy wait by running its loop,
    asleep in a single `time.sleep`.
    """
    if place not in asked_for:
        return ()
    kind, size_ns = asked_for[place]
    begun_ns = perf_counter_ns()
    if kind == "sleep":
        wait: Iterator[Any] = map(sleep, (size_ns / 1e9,))
    else:
        wait = takewhile((begun_ns + size_ns).__gt__, iter(perf_counter_ns, None))
    return chain(wait, map(partial(clock.spent, place), (begun_ns,)))
