"""How often does the tuner keep a change that does nothing?

python benchmarks/tuner_aa.py                      300 decisions per simulated scene (about two minutes)
python benchmarks/tuner_aa.py --real 30            and as many on real training loops (about three minutes)

Every decision is the whole tuner's: its controller, its windows, its sequential test. The simulated scenes
give it a clock: steps of 2.5 to 25 ms whose logarithms have the memory that 18,545 real steps on a shared
machine had (0.37, 0.25, 0.18, 0.13, 0.08 at lags of 1, 10, 50, 100, 200 steps; standard deviation 0.25).
The real loops are small ones in this process, with torch; the action is put in force and taken back in
them, and nothing of it is in the step. A predicted gain of a fifth gives a trial 16 pairs of windows at
most; of what nothing is predicted it gets 24.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from diagnose.actions.base import Action
from diagnose.core.finding import Gain
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.core.units import NS_PER_MS
from diagnose.tuner.controller import Controller
from diagnose.tuner.policy import Lead, Policy
from diagnose.tuner.world import World

Floats = npt.NDArray[np.float64]

# Axis: N steps.

NUM_TRIALS = 300
NUM_STEPS = 3000
"""More than a trial of 24 pairs of the longest windows takes."""

STEP_MS = (2.5, 25.0)
"""Windows last 50 ms at least: of such steps they hold 5 to 20."""

MEMORIES = ((0.21, 206.0), (0.165, 16.0))
"""Parts of the variance that fade away within so many steps: fitted by hand to the figures above. The rest
is each step's own."""

SPREAD = 0.25
CONFIDENCE = 0.95
PREDICTED = {"16": 1.25, "24": None}
"""Pairs that a trial may take, and the predicted speedup for which it does."""


class Nothing(Action):
    """Does nothing."""

    safety = Safety.EXACT

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        """See `Action.apply`."""
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def state(self, job: Job) -> Any:
        """See `Action.state`."""
        return self.on


class Found:
    """A diagnosis that is ready at once.

    Args:
        predicted: Of the action that does nothing; `None` for a rule that does not say.
    """

    def __init__(self, predicted: float | None) -> None:
        gain = Gain(speedup=predicted, low=1.0, high=2 * predicted) if predicted else None
        self._leads = [Lead(rule="", actions=("nothing",), gain=gain)]

    cost_ns = 0.0

    def leads(self) -> list[Lead]:
        """See `tuner.diagnosis.Diagnosis`."""
        return self._leads

    def close(self) -> None:
        """See `tuner.diagnosis.Diagnosis`."""


@dataclass(slots=True)
class Trial:
    """One decision, from the first step to the verdict.

    Attributes:
        predicted: The gain that is expected.
        clock: Nanoseconds.
        told: What became of the trial; empty before its end.
    """

    predicted: float | None
    clock: Callable[[], int]
    told: dict[str, Any] = field(default_factory=dict)

    def controller(self) -> Controller:
        """Returns the tuner of a process that trains."""
        world = World(
            job=Job(),
            actions={"nothing": Nothing()},
            diagnose=lambda first_step: Found(self.predicted),
            watch=nullcontext,
            check_numerics=_no_check,
            tell=self._tell,
            stop=lambda: None,
            clock=self.clock,
        )
        return Controller(world, Policy(only=frozenset({"nothing"})))

    def _tell(self, kind: str, detail: dict[str, Any]) -> None:
        assert kind != "tuning_error", detail
        if kind == "trial":
            self.told = detail


def _no_check(*_: object) -> Any:
    raise AssertionError("an action that touches nothing has no numerics check")


# -- simulated


def recorded_like(random: np.random.Generator) -> Floats:
    """The machine of the figures above; one step in a thousand takes much longer."""
    log_N = random.standard_normal(NUM_STEPS) * math.sqrt(1 - sum(part for part, _ in MEMORIES))
    for part, steps in MEMORIES:
        log_N += math.sqrt(part) * _remembering(random, math.exp(-1 / steps))
    hit_N = random.random(NUM_STEPS) < 0.001
    return np.exp(SPREAD * log_N) * np.where(hit_N, 1 + random.pareto(1.0, NUM_STEPS), 1.0)


def _remembering(random: np.random.Generator, rho: float) -> Floats:
    draws_N = random.standard_normal(NUM_STEPS)
    made_N = np.empty(NUM_STEPS)
    made_N[0] = draws_N[0]
    for n in range(1, NUM_STEPS):
        made_N[n] = rho * made_N[n - 1] + math.sqrt(1 - rho**2) * draws_N[n]
    return made_N


def quiet(random: np.random.Generator) -> Floats:
    """Steps of their own, 5 % apart."""
    steps_N: Floats = np.exp(0.05 * random.standard_normal(NUM_STEPS))
    return steps_N


def heavy_tails(random: np.random.Generator) -> Floats:
    """One step in fifty takes up to many times as long."""
    hit_N = random.random(NUM_STEPS) < 0.02
    return recorded_like(random) * np.where(hit_N, 1 + random.pareto(1.5, NUM_STEPS), 1.0)


def drift(random: np.random.Generator) -> Floats:
    """The machine becomes up to twice as fast or as slow within 500 steps, back and forth."""
    phase = random.uniform(0, 2 * math.pi)
    wave_N = np.sin(2 * math.pi * np.arange(NUM_STEPS) / random.uniform(500, 2000) + phase)
    drifting_N: Floats = recorded_like(random) * np.exp(random.uniform(0.1, 0.35) * wave_N)
    return drifting_N


def neighbour(random: np.random.Generator) -> Floats:
    """Another program takes a third of the machine, for about sixty steps at a time."""
    now, inside_N = False, np.empty(NUM_STEPS, dtype=bool)
    flips_N = random.random(NUM_STEPS)
    for n in range(NUM_STEPS):
        now = flips_N[n] >= 1 / 60 if now else flips_N[n] < 1 / 150
        inside_N[n] = now
    return recorded_like(random) * np.where(inside_N, 1.5, 1.0)


def every_so_often(random: np.random.Generator) -> Floats:
    """Each fifth to sixtieth step takes three times as long: a log line, a loader's queue that runs dry."""
    period = int(random.integers(5, 61))
    long_N = (np.arange(NUM_STEPS) + random.integers(period)) % period == 0
    steps_N: Floats = np.exp(0.05 * random.standard_normal(NUM_STEPS)) * np.where(long_N, 3.0, 1.0)
    return steps_N


SCENES: Mapping[str, Callable[[np.random.Generator], Floats]] = {
    "quiet": quiet,
    "as recorded": recorded_like,
    "heavy tails": heavy_tails,
    "drift": drift,
    "neighbour": neighbour,
    "a long step every so often": every_so_often,
}


def simulated(
    scene: Callable[[np.random.Generator], Floats], seed: int, predicted: float | None
) -> dict[str, Any]:
    """Returns what became of a trial of nothing on such a machine."""
    random = np.random.default_rng(seed)
    step_ns = math.exp(random.uniform(*map(math.log, STEP_MS))) * NS_PER_MS
    now = 0
    trial = Trial(predicted, lambda: now)
    control = trial.controller()
    for number, share in enumerate(scene(random), 1):
        now += int(share * step_ns)
        control.boundary(number, aside=False)
        if trial.told:
            break
    control.finish()
    return trial.told


# -- real


class Noisy(Dataset[torch.Tensor]):
    """Rows that take some Python to make."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float((index * k) % 17) for k in range(256)])


def dense() -> Callable[[], object]:
    """A deep, narrow network: hundreds of small operations."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(12)))
    return _step_of(model, lambda: torch.randn(32, 64))


def convolutions() -> Callable[[], object]:
    """A few large operations."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(1))
    return _step_of(model, lambda: torch.randn(8, 3, 32, 32))


def loading() -> Callable[[], object]:
    """Batches made on the training thread, by Python."""
    loader = DataLoader(Noisy(), batch_size=32, shuffle=True)
    batches = iter(loader)

    def batch() -> torch.Tensor:
        nonlocal batches
        found = next(batches, None)
        if found is None:
            batches = iter(loader)
            found = next(batches)
        return found

    return _step_of(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)), batch)


def _step_of(model: nn.Module, batch: Callable[[], torch.Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()

    return step


LOOPS: Sequence[Callable[[], Callable[[], object]]] = (dense, convolutions, loading)


def real(step: Callable[[], object], predicted: float | None) -> dict[str, Any]:
    """Returns what became of a trial of nothing on a real loop."""
    trial = Trial(predicted, time.perf_counter_ns)
    control = trial.controller()
    number = 0
    while not trial.told:
        step()
        number += 1
        control.boundary(number, aside=False)
    control.finish()
    return trial.told


# -- the tables


def at_most(errors: int, trials: int) -> float:
    """Returns the upper end of the exact (Clopper-Pearson) one-sided interval of a rate."""
    low, high = errors / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        as_few = sum(
            math.comb(trials, k) * middle**k * (1 - middle) ** (trials - k) for k in range(errors + 1)
        )
        low, high = (middle, high) if as_few > 1 - CONFIDENCE else (low, middle)
    return high


def row(name: str, pairs: str, told: Sequence[Mapping[str, Any]]) -> str:
    """One line of a table."""
    kept = sum(trial["outcome"] == "kept" for trial in told)
    spent = sorted(trial["steps_spent"] for trial in told)
    undecided = sum(trial["outcome"] == "cannot_tell" for trial in told)
    return (
        f"| {name} | {pairs} | {kept} of {len(told)} | {kept / len(told):.1%} |"
        f" {at_most(kept, len(told)):.1%} | {undecided / len(told):.0%} | {spent[len(spent) // 2]} |"
    )


HEAD = """| | pairs at most | kept | rate | at most (95 %) | cannot tell | steps, median |
|---|---|---|---|---|---|---|"""


def main() -> int:
    """Prints the tables."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--trials", type=int, default=NUM_TRIALS, help="simulated, per scene")
    asked.add_argument("--real", type=int, default=0, help="on real loops, in all")
    options = asked.parse_args()
    print("# How often a change that does nothing is kept\n")
    command = "benchmarks/tuner_aa.py" + (f" --real {options.real}" if options.real else "")
    print(f"`python {command}`, torch {torch.__version__}, {os.cpu_count()} CPUs.", end=" ")
    print("Each is one whole trial of the tuner, of an action that does nothing; the script says how.\n")
    print(f"## Simulated machines\n\n{HEAD}")
    for name, scene in SCENES.items():
        for pairs, predicted in PREDICTED.items():
            told = [simulated(scene, seed, predicted) for seed in range(options.trials)]
            print(row(name, pairs, told), flush=True)
    if options.real:
        torch.manual_seed(0)
        print(f"\n## Real loops\n\n{HEAD}")
        every: list[dict[str, Any]] = []
        for index, loop in enumerate(LOOPS):
            told = []
            for number in range(index, options.real, len(LOOPS)):
                predicted = list(PREDICTED.values())[number % len(PREDICTED)]
                told.append(real(loop(), predicted))
            if told:
                print(row(loop.__name__, "16 or 24", told), flush=True)
            every += told
        print(row("all", "16 or 24", every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
