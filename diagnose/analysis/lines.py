"""The source lines that time was spent on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.gaps import placed_samples
from diagnose.analysis.helpers import Helpers, LineKey, as_part
from diagnose.analysis.long_steps import LongSteps
from diagnose.analysis.writing import Writing
from diagnose.core.ledger import COMMUNICATION, COUNTS, FIRST_GAP, FORWARD, HOOKED
from diagnose.core.phases import Phase
from diagnose.core.profile import SourceLine
from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.purposes import (
    CHAIN,
    ENVIRONMENT,
    METRIC,
    PYTHON_LOOP,
    ROLLOUT,
    ROWS,
    SLICES,
    SYNC,
)
from diagnose.source.results import Results
from diagnose.source.roles import Roles
from diagnose.source.sites import schedules_of
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame, RankLog

MIN_SHARE = 0.001
"""Lines below a thousandth of the time are noise of the sampler."""

TRAINED = (Phase.BACKWARD, Phase.OPTIMIZER)
"""A line in which a package does both leaves training to it."""

ACTS = {ENVIRONMENT, ROLLOUT}
HOW = {PYTHON_LOOP, SLICES, ROWS, CHAIN}
"""Idioms that say how a line works, and not what for."""


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
    sources = places.sources
    idioms = Idioms(places, schedules_of(log.sites))
    seen = _seen(log, rows, warmup, roles, places, idioms)
    lines = seen.lines
    by_package = {key for key, line in lines.items() if line.by_library}
    trainers = {frame for _, frame in by_package if all((phase, frame) in by_package for phase in TRAINED)}
    served = seen.helpers.served({key: line.by_idiom for key, line in lines.items()}, sources)
    purposes = seen.helpers.purposes()
    num_samples = log.meta.get("samples") or 1
    one_sample_ns = sum(weight for _, _, _, weight in log.samples) / num_samples or 1.0

    def share(slot: int, weight_ns: float) -> float:
        return float(slot_ns[slot]) * weight_ns / seen.by_slot[slot] / total_ns

    def whole(by_slot: Mapping[int, float]) -> float:
        return sum((share(slot, ns) for slot, ns in by_slot.items()), 0.0)

    def line_of(key: LineKey) -> SourceLine:
        phase, frame = key
        file, line, function = frame
        found, model_ns = lines[key], seen.models.get(frame)
        by_idiom = served.get(key, found.by_idiom)
        idiom = max(by_idiom, key=by_idiom.__getitem__)
        return SourceLine(
            phase=phase,
            file=file,
            line=line,
            function=function,
            trains=frame in trainers,
            share=whole(found.by_slot),
            between=whole({slot: ns for slot, ns in found.by_slot.items() if slot >= FIRST_GAP}),
            model_share=share(FORWARD, model_ns) if model_ns else 0.0,
            acting=whole(found.acting),
            irregular=whole(found.irregular),
            for_loss=whole(found.for_loss),
            num_samples=max(1, round(sum(found.by_slot.values()) / one_sample_ns)),
            text=sources.line(file, line),
            via=_heaviest(found.by_library),
            every=found.every,
            num_operations=idioms.operations(file, line) if phase is Phase.OPTIMIZER else 0,
            idiom=() if frame in trainers else as_part(purposes.get(key, ""), idiom),
        )

    return _ranked(map(line_of, lines))


def _by() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclass(slots=True)
class SeenLine:
    """Nanoseconds of the samples of a line in one phase.

    Attributes:
        every: How often the loop gets there, as `SourceLine.every` has it.
        by_slot: All of them, by slot.
        acting: Those in an environment, or choosing what to do in it, by slot.
        irregular: Other ones between the hooks, as far as they make single steps long, by slot.
        for_loss: Those in collectives that get what the loss is made of, by slot.
        by_idiom: All of them, by what the line does.
        by_library: Those in packages, by the package's frame.
    """

    every: str
    by_slot: dict[int, float] = field(default_factory=_by)
    acting: dict[int, float] = field(default_factory=_by)
    irregular: dict[int, float] = field(default_factory=_by)
    for_loss: dict[int, float] = field(default_factory=_by)
    by_idiom: dict[tuple[str, ...], float] = field(default_factory=_by)
    by_library: dict[Frame, float] = field(default_factory=_by)


@dataclass(slots=True)
class Seen:
    """What the samples of the training thread tell.

    Attributes:
        helpers: The functions that the loop calls between its steps.
        by_slot: Nanoseconds of all samples, by slot.
        models: Those in a model's call, by each frame that they are in.
        lines: The lines, in the order in which they were first seen.
    """

    helpers: Helpers
    by_slot: dict[int, float] = field(default_factory=_by)
    models: dict[Frame, float] = field(default_factory=_by)
    lines: dict[LineKey, SeenLine] = field(default_factory=dict)


def _seen(
    log: RankLog, rows: npt.NDArray[np.int64], warmup: int, roles: Roles, places: Places, idioms: Idioms
) -> Seen:
    """Counts the samples, by what they were seen in. Arguments as of `source_lines`."""
    waits = log.meta.get("device", "cpu") != "cpu"
    seen, results = Seen(Helpers(waits=waits)), Results(places)
    writing = Writing(log.writing, roles)
    long_steps = LongSteps(rows, by_device=bool(log.meta.get(BY_DEVICE)))
    for slot, place, (library, *stack), weight_ns in placed_samples(log, warmup):
        seen.by_slot[slot] += weight_ns
        if slot == FORWARD:
            for frame in set(stack):
                seen.models[frame] += weight_ns
        if not stack:
            continue
        phase = HOOKED[slot] if slot < FIRST_GAP else roles.phase(stack, slot)
        key = (phase, stack[0])
        idiom = _idiom(stack, named(library), slot, phase, roles, idioms, results, waits=waits)
        written = writing.purpose(stack) if phase is Phase.OTHER and set(idiom) <= HOW | {SYNC} else ""
        idiom = (written,) if written else idiom
        if key not in seen.lines:
            seen.lines[key] = SeenLine(idioms.every(stack))
        line = seen.lines[key]
        line.by_slot[slot] += weight_ns
        line.by_idiom[idiom] += weight_ns
        if ACTS & set(idiom):
            line.acting[slot] += weight_ns
        elif slot >= FIRST_GAP:  # what hooks measure has rules of its own
            line.irregular[slot] += weight_ns * long_steps.part(slot, place)
        if slot == COMMUNICATION and roles.gathers_loss(stack):
            line.for_loss[slot] += weight_ns
        if library[0]:
            line.by_library[library] += weight_ns
        helper = roles.helper(stack) if phase in (Phase.OTHER, Phase.GC) else None
        if helper is not None:
            seen.helpers.add(helper, key, idiom, weight_ns)
    return seen


def _idiom(
    stack: Sequence[Frame],
    via: str,
    slot: int,
    phase: Phase,
    roles: Roles,
    idioms: Idioms,
    results: Results,
    *,
    waits: bool,
) -> tuple[str, ...]:
    """Returns what a stack does, as `Idioms.of` and its place in the loop tell.

    Args:
        stack: The user's frames, innermost first.
        via: The frame of an installed package inside them, or nothing.
        slot: What it was sampled in.
        phase: What that is part of.
        roles: Tells what lines serve.
        idioms: Tells what lines do.
        results: Tells which lines work on what a model has computed.
        waits: Whether reading a tensor's value waits for a device.
    """
    between = slot >= FIRST_GAP
    called = slot == FORWARD and roles.calls_model(stack[0])
    own = roles.within_call(stack, slot)
    idiom = idioms.of(stack, via, phase, waits=waits, called=called, own=own)
    if between and ROLLOUT not in idiom and roles.acts(stack):
        idiom = (ENVIRONMENT,)
    exchanges = roles.exchanges(stack) if between or phase is Phase.EVALUATION else ""
    if exchanges and not ACTS & set(idiom):
        idiom = (ENVIRONMENT,) if exchanges == ENVIRONMENT else (*idiom, ROLLOUT)
    if phase is Phase.EVALUATION and not ACTS & set(idiom) and roles.writes_batch(stack):
        idiom = (*idiom, ROLLOUT)
    says_how = set(idiom) <= (HOW if waits else HOW | {SYNC})
    if phase is Phase.OTHER and says_how and _scores(stack, roles, results):
        idiom = (METRIC,)
    if phase is Phase.FORWARD and between and METRIC in idiom and roles.makes_loss(stack):
        idiom = tuple(each for each in idiom if each != METRIC)  # whatever it is called
    return idiom


def _scores(stack: Sequence[Frame], roles: Roles, results: Results) -> bool:
    """Whether a stack works on what a model has computed, and trains nothing with it."""
    found = roles.results(stack)
    return found is not None and results.reach(*found)


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
