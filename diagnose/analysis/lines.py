"""The source lines that time was spent on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.gaps import measured_samples, placed_samples
from diagnose.analysis.long_steps import LongSteps
from diagnose.core.ledger import COMMUNICATION, COUNTS, FIRST_GAP, FORWARD, HOOKED
from diagnose.core.phases import Phase
from diagnose.core.profile import SourceLine
from diagnose.source.blocks import lines_beside
from diagnose.source.function_names import PURPOSES
from diagnose.source.idioms import Idioms
from diagnose.source.names import words
from diagnose.source.places import Places
from diagnose.source.purposes import (
    CHAIN,
    ENVIRONMENT,
    LOG,
    METRIC,
    PYTHON_LOOP,
    ROLLOUT,
    ROWS,
    SAVE,
    SLICES,
    SYNC,
    WAIT,
)
from diagnose.source.results import Results
from diagnose.source.roles import Roles
from diagnose.source.sites import schedules_of
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame, RankLog

MIN_SHARE = 0.001
"""Lines below a thousandth of the time are noise of the sampler."""

LineKey = tuple[Phase, Frame]
ACTS = {ENVIRONMENT, ROLLOUT}
Helper = tuple[str, str]
"""File and name of a function that the loop calls between its steps."""

NO_HELPER = ("", "")

TRAINED = (Phase.BACKWARD, Phase.OPTIMIZER)
"""A line in which a package does both leaves training to it."""

REPORTS = re.compile(r"\bprint\(|\badd_\w+\(|\b(log(ging|ger)?|wandb|mlflow)\.\w+\(", re.IGNORECASE)
"""Logs, rather than writes a file."""

SAVING = {"save", "saves", "saving", "checkpoint", "ckpt", "snapshot", "dump", "keep", "persist", "store"}
"""Words in the names of functions that save the state."""

MOST = 0.5
"""A helper of which a larger part has one purpose is for that as a whole."""


def source_lines(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles, places: Places
) -> list[SourceLine]:
    """Returns the user's lines on the training thread by their share of the measured time, highest first.

    How much time each slot took is measured exactly; the samples only divide it among lines. So the shares
    of a slot's lines sum to the slot's share.

    Args:
        log: One rank's records.
        rows: Its measured steps.
        warmup: Leading steps whose samples are left out.
        roles: Tells what a line between hooks serves.
        places: Where the statements of a line, and its text, are read.
    """
    slot_ns = rows[:, len(COUNTS) :].sum(axis=0).astype(float)
    total_ns = float(slot_ns.sum())
    if not total_ns:
        return []
    sampled: dict[int, float] = defaultdict(float)
    weights: dict[LineKey, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    libraries: dict[LineKey, dict[Frame, float]] = defaultdict(lambda: defaultdict(float))
    sources = places.sources
    idioms = Idioms(places, schedules_of(log.sites))
    results = Results(places)
    waits = log.meta.get("device", "cpu") != "cpu"
    purposes: dict[LineKey, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    acting: dict[LineKey, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    irregular: dict[LineKey, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for_loss: dict[LineKey, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    long_steps = LongSteps(rows, by_device=bool(log.meta.get(BY_DEVICE)))
    helpers: dict[Helper, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
    helper_of: dict[LineKey, Helper] = {}
    models: dict[Frame, float] = defaultdict(float)
    every: dict[LineKey, str] = {}
    for slot, place, (library, *stack), weight_ns in placed_samples(log, warmup):
        sampled[slot] += weight_ns
        for frame in set(stack) if slot == FORWARD else ():
            models[frame] += weight_ns
        if stack:
            phase = HOOKED[slot] if slot < FIRST_GAP else roles.phase(stack, slot)
            called = slot == FORWARD and roles.calls_model(stack[0])
            own = roles.within_call(stack, slot)
            idiom = idioms.of(stack, named(library), phase, waits=waits, called=called, own=own)
            if slot >= FIRST_GAP and ROLLOUT not in idiom and roles.acts(stack):
                idiom = (ENVIRONMENT,)
            exchanges = roles.exchanges(stack) if slot >= FIRST_GAP or phase is Phase.EVALUATION else ""
            if exchanges and not ACTS & set(idiom):
                idiom = (ENVIRONMENT,) if exchanges == ENVIRONMENT else (*idiom, ROLLOUT)
            if phase is Phase.OTHER and _says_how(idiom, waits=waits) and _scores(stack, roles, results):
                idiom = (METRIC,)
            if phase is Phase.FORWARD and slot >= FIRST_GAP and METRIC in idiom and roles.makes_loss(stack):
                idiom = tuple(each for each in idiom if each != METRIC)  # whatever it is called
            key = (phase, stack[0])
            weights[key][slot] += weight_ns
            every.setdefault(key, idioms.every(stack))
            purposes[key][idiom] += weight_ns
            acts = bool(ACTS & set(idiom))
            acting[key][slot] += weight_ns if acts else 0.0
            irregular[key][slot] += 0.0 if acts else weight_ns * long_steps.part(slot, place)
            gathers = slot == COMMUNICATION and roles.gathers_loss(stack)
            for_loss[key][slot] += weight_ns if gathers else 0.0
            helper = roles.helper(stack) if phase in (Phase.OTHER, Phase.GC) else None
            if helper is not None:
                helpers[helper][idiom] += weight_ns
                helper_of[key] = helper
            if library[0]:
                libraries[phase, stack[0]][library] += weight_ns
    trainers = {frame for _, frame in libraries if all((phase, frame) in libraries for phase in TRAINED)}
    of_helper = {helper: _purpose(parts, waits=waits) for helper, parts in helpers.items()}
    parts = {key: p for key, p in purposes.items() if key[0] is Phase.CHECKPOINT or key in helper_of}
    saves = _saving(parts, sources)
    for key in helper_of:
        file, line, function = key[1]
        beside = saves.get((file, function), ())
        if (beside is None or line in beside) and not REPORTS.search(sources.line(file, line)):
            purposes[key] = _served(purposes[key])
    num_samples = log.meta.get("samples") or 1
    one_sample_ns = sum(weight for _, _, _, weight in log.samples) / num_samples or 1.0

    def share(slot: int, weight_ns: float) -> float:
        return float(slot_ns[slot]) * weight_ns / sampled[slot] / total_ns

    def whole(by_slot: Mapping[int, float]) -> float:
        return sum(share(slot, ns) for slot, ns in by_slot.items())

    def line_of(key: LineKey) -> SourceLine:
        phase, frame = key
        file, line, function = frame
        by_slot, model_ns = weights[key], models.get(frame)
        purpose = of_helper.get(helper_of.get(key, NO_HELPER), "")
        idiom = max(found := purposes[key], key=found.__getitem__)
        return SourceLine(
            phase=phase,
            file=file,
            line=line,
            function=function,
            trains=frame in trainers,
            share=whole(by_slot),
            between=whole({slot: ns for slot, ns in by_slot.items() if slot >= FIRST_GAP}),
            model_share=share(FORWARD, model_ns) if model_ns else 0.0,
            acting=whole(acting[key]),
            irregular=whole(irregular[key]),
            for_loss=whole(for_loss[key]),
            num_samples=max(1, round(sum(by_slot.values()) / one_sample_ns)),
            text=sources.line(file, line),
            via=_heaviest(libraries[key]),
            every=every[key],
            num_operations=idioms.operations(file, line) if phase is Phase.OPTIMIZER else 0,
            idiom=() if frame in trainers else _as_part(purpose, idiom),
        )

    return _ranked(map(line_of, weights))


def _says_how(idiom: Sequence[str], *, waits: bool) -> bool:
    """Whether idioms say how a line works, and not what for."""
    return not set(idiom) - ({PYTHON_LOOP, SLICES, ROWS, CHAIN} | (set() if waits else {SYNC}))


def _scores(stack: Sequence[Frame], roles: Roles, results: Results) -> bool:
    """Whether a stack works on what a model has computed, and trains nothing with it."""
    found = roles.results(stack)
    return found is not None and results.reach(*found)


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


def _as_part(purpose: str, idiom: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what a line is for as a part of a helper: what says nothing of its own serves the whole."""
    if not purpose or PURPOSES & set(idiom):
        return idiom
    if purpose == PYTHON_LOOP:
        return (PYTHON_LOOP,) if idiom == (SYNC,) else idiom
    return purpose, *(each for each in idiom if each != PYTHON_LOOP)


def standing_ns(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles, idioms: Idioms
) -> float:
    """Returns nanoseconds of the mean step in lines that only wait, in the loop and for nothing else.

    Args:
        log: One rank's records.
        rows: Its measured steps.
        warmup: Leading steps whose samples are left out.
        roles: Tells what a line between hooks serves.
        idioms: Tells what a line is there for.
    """

    def stands(stack: Sequence[Frame], slot: int) -> bool:
        waits = slot >= FIRST_GAP and WAIT in idioms.of_line(*stack[0][:2])
        return waits and roles.phase(stack, slot) is Phase.OTHER

    return _spent_ns(log, rows, warmup, stands)


def working_ns(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles, idioms: Idioms
) -> float:
    """Returns nanoseconds of the mean step in which the loop works on a batch that it has, before the model
    gets it. Arguments as of `standing_ns`."""

    def works(stack: Sequence[Frame], slot: int) -> bool:
        waits = slot < FIRST_GAP or WAIT in idioms.of_line(*stack[0][:2])
        return not waits and roles.works_on_batch(stack, slot)

    return _spent_ns(log, rows, warmup, works)


def gathering_ns(log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles) -> float:
    """Returns nanoseconds of the mean step in collectives that get what the loss or a batch is made of.
    Arguments as of `standing_ns`."""

    def gathers(stack: Sequence[Frame], slot: int) -> bool:
        return slot == COMMUNICATION and roles.gathers_loss(stack)

    return _spent_ns(log, rows, warmup, gathers)


def _spent_ns(
    log: RankLog,
    rows: npt.NDArray[np.int64],
    warmup: int,
    wanted: Callable[[Sequence[Frame], int], bool],
) -> float:
    """Returns nanoseconds of the mean step in stacks, each of a slot, that are wanted."""
    sampled: dict[int, float] = defaultdict(float)
    found: dict[int, float] = defaultdict(float)
    for slot, (_, *stack), weight_ns in measured_samples(log, warmup):
        sampled[slot] += weight_ns
        if stack and wanted(stack, slot):
            found[slot] += weight_ns
    mean_ns = rows[:, len(COUNTS) :].mean(axis=0) if len(rows) else np.zeros(rows.shape[1])
    return sum((float(mean_ns[slot]) * ns / sampled[slot] for slot, ns in found.items()), 0.0)


def worker_lines(log: RankLog, sources: Sources) -> list[SourceLine]:
    """Returns the user's lines inside DataLoader workers by their share of the workers' busy time."""
    total = sum(weight for _, weight in log.worker_samples)
    weights: dict[Frame, int] = {}
    for (_, *stack), weight in log.worker_samples:
        if stack:
            weights[stack[0]] = weights.get(stack[0], 0) + weight
    return _ranked(
        SourceLine(
            phase=Phase.DATA_WAIT,
            file=file,
            line=line,
            function=function,
            share=weight / total,
            in_worker=True,
            text=sources.line(file, line),
        )
        for (file, line, function), weight in weights.items()
    )


def _ranked(lines: Iterable[SourceLine]) -> list[SourceLine]:
    return sorted((line for line in lines if line.share >= MIN_SHARE), key=lambda line: -line.share)


def _heaviest(libraries: dict[Frame, float]) -> str:
    """Names the package's frame that took most."""
    return named(max(libraries, key=lambda frame: libraries[frame])) if libraries else ""


def named(library: Frame) -> str:
    """Names a package's frame: `transformers/trainer.py:2520 Trainer._inner_training_loop`."""
    file, line, function = library
    if not file:
        return ""
    path = Path(file)
    inside = next(
        (i for i, part in enumerate(path.parts) if part.endswith("-packages")), len(path.parts) - 2
    )
    return f"{'/'.join(path.parts[inside + 1 :])}:{line} {function}"
