"""Which time `attribution.py` wastes where, and the phase that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE_MS = 8.0
PAIR_MS = (6.0, 9.0)
IN_WORKERS_MS = 20.0
"""Time wasted per step; in two workers, per batch. A step of a millisecond or two then takes 10 to 20."""

SLOW_ROWS = 4
ONCE_IN_5 = 0.2
PHASES: dict[str, tuple[str, float]] = {
    "dataset": ("data_wait", SLOW_ROWS),
    "collate": ("data_wait", 1),
    "stream": ("data_wait", SLOW_ROWS),
    "get_batch": ("data_wait", 1),
    "generator": ("data_wait", 1),
    "augment": ("data_wait", 1),
    "gather": ("data_wait", 1),
    "forward": ("forward", 1),
    "loss": ("forward", 1),
    "backward": ("backward", 1),
    "optimizer": ("optimizer", 1),
    "evaluation": ("evaluation", 2 * ONCE_IN_5),
    "validation dataset": ("evaluation", 2 * SLOW_ROWS * ONCE_IN_5),
    "metric": ("evaluation", ONCE_IN_5),
    "checkpoint": ("checkpoint", ONCE_IN_5),
    "gc": ("gc", ONCE_IN_5),
    "gc in forward": ("gc", 1),
    "before forward": ("other", 1),
    "beside loss": ("other", 1),
    "after optimizer": ("other", 1),
    "in train_step": ("other", 1),
    "in closure": ("other", 1),
}
"""The phase that each place belongs to, by `design.md`, and how often a step passes there, roughly."""

STAGES = {"dataset": "fetch", "stream": "fetch", "collate": "collate"}
"""The stage of loading a batch that a place belongs to; the report has their times besides the phases."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Time to be wasted at one place of the job: busy or asleep, so much per step."""

    place: str
    kind: str
    ms_per_step: float

    @property
    def phase(self) -> str:
        return PHASES[self.place][0]

    @property
    def argument(self) -> str:
        return f"{self.place}:{self.kind}:{self.ms_per_step / PHASES[self.place][1]:.4f}"

    def __str__(self) -> str:
        return f"{self.place} {self.kind}"


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a loop of the job, with up to two faults."""

    loop: str
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return f"{self.loop}: {' + '.join(map(str, self.faults)) or 'no fault'}"


def single(loop: str, place: str, *kinds: str) -> list[Case]:
    size = IN_WORKERS_MS if loop == "workers" else SINGLE_MS
    return [Case(loop, (Fault(place, kind, size),)) for kind in kinds or ("busy", "sleep")]


def pair(loop: str, first: str, second: str) -> Case:
    """The first place is busy, the second asleep."""
    return Case(loop, (Fault(first, "busy", PAIR_MS[0]), Fault(second, "sleep", PAIR_MS[1])))


CASES = (
    *single("loader", "dataset"),
    *single("loader", "collate"),
    *single("loader", "before forward"),
    *single("loader", "forward"),
    *single("loader", "beside loss"),
    *single("loader", "loss"),
    *single("loader", "backward"),
    *single("loader", "optimizer"),
    *single("loader", "after optimizer"),
    *single("loader", "evaluation"),
    *single("loader", "validation dataset"),
    *single("loader", "metric"),
    *single("loader", "checkpoint"),
    *single("loader", "gc"),
    *single("loader", "gc in forward", "busy"),
    pair("loader", "dataset", "collate"),
    pair("loader", "collate", "forward"),
    pair("loader", "forward", "loss"),
    pair("loader", "loss", "beside loss"),
    pair("loader", "beside loss", "backward"),
    pair("loader", "backward", "optimizer"),
    pair("loader", "optimizer", "checkpoint"),
    pair("loader", "checkpoint", "evaluation"),
    pair("loader", "evaluation", "gc"),
    pair("loader", "gc", "after optimizer"),
    pair("loader", "after optimizer", "before forward"),
    pair("loader", "before forward", "dataset"),
    *single("workers", "dataset"),
    *single("workers", "collate"),
    *single("iterable", "stream"),
    pair("iterable", "collate", "stream"),
    *single("get_batch", "get_batch"),
    *single("get_batch", "before forward", "busy"),
    *single("get_batch", "after optimizer", "sleep"),
    *single("get_batch", "loss", "busy"),
    *single("get_batch", "evaluation"),
    pair("get_batch", "get_batch", "before forward"),
    pair("get_batch", "after optimizer", "get_batch"),
    *single("get_batch-between", "get_batch"),
    *single("get_batch-between", "loss", "busy"),
    pair("get_batch-between", "get_batch", "beside loss"),
    pair("get_batch-between", "loss", "get_batch"),
    *single("generator", "generator"),
    pair("generator", "before forward", "generator"),
    *single("list", "augment"),
    *single("list", "before forward", "sleep"),
    pair("list", "augment", "after optimizer"),
    *single("table", "gather", "operator"),
    *single("helper", "get_batch"),
    *single("helper", "in train_step", "busy"),
    pair("helper", "get_batch", "in train_step"),
    pair("helper", "after optimizer", "get_batch"),
    *single("closure", "in closure", "busy"),
    *single("closure", "optimizer"),
    *single("closure", "forward", "sleep"),
    pair("closure", "backward", "in closure"),
    pair("closure", "optimizer", "dataset"),
)

QUICK = (
    *single("loader", "dataset", "sleep"),
    pair("loader", "loss", "beside loss"),
    pair("loader", "backward", "optimizer"),
    pair("loader", "optimizer", "checkpoint"),
    pair("loader", "evaluation", "gc"),
    pair("get_batch-between", "get_batch", "beside loss"),
)
"""One run for each phase, or nearly; a part of `CASES`."""
