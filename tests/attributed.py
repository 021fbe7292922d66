"""Pairs of runs of two versions whose steps take known times, and what their loss is attributed to."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.gate.attribution import Runs, attribute
from diagnose.gate.cause import Why
from diagnose.gate.result import Metric
from diagnose.rules import profile

MS = 1_000_000
STEP_MS = {
    Phase.DATA_WAIT: 18.0,
    Phase.COPY: 1.0,
    Phase.FORWARD: 25.0,
    Phase.BACKWARD: 42.0,
    Phase.OPTIMIZER: 9.0,
    Phase.CHECKPOINT: 2.0,
    Phase.OTHER: 3.0,
}

QUIET = (0.005, 0.01)


def a_run(chance_of: random.Random, noise: tuple[float, float], **more_ms: float) -> Profile:
    """A run of about 100 ms a step, in which some phases take more."""
    speed = chance_of.gauss(1, noise[0])
    times = {
        phase.value: (ms + more_ms.get(phase.value, 0.0)) * speed * max(0.5, chance_of.gauss(1, noise[1]))
        for phase, ms in STEP_MS.items()
    }
    return profile(
        step_ms=sum(times.values()), num_rules=80, **{f"{name}_ms": ms for name, ms in times.items()}
    )


def pairs_of(
    seed: int, count: int = 10, noise: tuple[float, float] = QUIET, **more_ms: float
) -> tuple[list[Profile], list[Profile]]:
    chance_of = random.Random(seed)
    before = [a_run(chance_of, noise) for _ in range(count)]
    return before, [a_run(chance_of, noise, **more_ms) for _ in range(count)]


def attributed(
    before: list[Profile], after: list[Profile], *roots: Path, metric: Metric = Metric.SAMPLES_PER_S
) -> Why:
    one, other = roots or (Path("/base"), Path("/head"))
    sides = Runs(root=one, profiles=tuple(before)), Runs(root=other, profiles=tuple(after))
    return attribute(*sides, metric)


BEFORE = """\
import time

def load(index):
    return decode(index)

def step(model, batch):
    loss = model(batch)
    loss.backward()
"""
AFTER = """\
import time

def load(index):
    return decode(index)

def step(model, batch):
    batch = normalized(
        batch,
    )
    loss = model(batch, slow=True)
    loss.backward()
"""


def version(root: Path, text: str, times_ms: Mapping[tuple[int, str], float], runs: Profile) -> Profile:
    """A run of `train.py` in a root of its own, whose lines take these times."""
    root.mkdir(exist_ok=True)
    (root / "train.py").write_text(text)
    where = tuple(
        SourceLine(
            phase=Phase.FORWARD,
            file=str(root / "train.py"),
            line=number,
            function=function,
            share=ms * MS / runs.step_time_ns,
            num_samples=100,
            text=text.splitlines()[number - 1].strip(),
            idiom=("sync",) if number == 7 else (),
        )
        for (number, function), ms in times_ms.items()
    )
    return replace(runs, where=where)
