"""How often does the watch on the loss err, and how soon does it see a training that goes wrong?

python benchmarks/loss_alarms.py            prints the tables in markdown (about a minute)
python benchmarks/loss_alarms.py --runs 20

Simulated losses fall to a floor, exponentially or by a power law, at rates and with noise (3 to 40 % of
the loss, log-normal, each step depending on the one before) drawn for each run; each kind adds what real
ones have. The faults begin at step 1500.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from diagnose.tuner.loss_trend import LossTrend

Floats = npt.NDArray[np.float64]
Random = np.random.Generator

# Axis: N steps.

NUM_STEPS = 5000
FAULT_AT = 1500


def falling(random: Random, num_steps: int, *, rho: float = 0.3, power: bool = False) -> Floats:
    """The trend and the noise that all kinds share."""
    step_N = np.arange(num_steps)
    draws_N = random.standard_normal(num_steps)
    noise_N = np.empty(num_steps)
    noise_N[0] = draws_N[0]
    for n in range(1, num_steps):
        noise_N[n] = rho * noise_N[n - 1] + math.sqrt(1 - rho**2) * draws_N[n]
    trend_N = random.uniform(0.05, 1) + random.uniform(0.5, 3) * np.exp(-step_N / random.uniform(100, 5000))
    if power:
        trend_N = 6 * (step_N + 10.0) ** -random.uniform(0.05, 0.4)
    losses_N: Floats = trend_N * np.exp(random.uniform(0.03, 0.4) * noise_N)
    return losses_N


def heavy_tails(random: Random, num_steps: int) -> Floats:
    """Single batches far above the rest, as Student's t with 3 degrees of freedom."""
    return falling(random, num_steps) * (1 + 0.2 * np.abs(random.standard_t(3, num_steps)))


def spikes(random: Random, num_steps: int) -> Floats:
    """One step in a hundred has two to ten times the loss."""
    hit_N = random.random(num_steps) < 0.01
    return falling(random, num_steps) * np.where(hit_N, random.uniform(2, 10, num_steps), 1.0)


def epochs(random: Random, num_steps: int) -> Floats:
    """The loss drops where an epoch begins, and creeps up within it: the data are learnt by heart."""
    length = int(random.integers(50, 1000))
    step_N = np.arange(num_steps)
    return falling(random, num_steps) * 0.95 ** (step_N // length) * (1 + 0.1 * (step_N % length) / length)


def wandering(random: Random, num_steps: int) -> Floats:
    """The level takes a random walk."""
    walk_N: Floats = np.exp(np.cumsum(random.standard_normal(num_steps)) * 0.003)
    return falling(random, num_steps) * walk_N


def hard_and_easy(random: Random, num_steps: int) -> Floats:
    """The data come in runs of harder and easier batches, 20 to 100 steps each."""
    length = int(random.integers(20, 100))
    hard_N = (np.arange(num_steps) // length) % 2 == 1
    return falling(random, num_steps) * np.where(hard_N, 1 + random.uniform(0.03, 0.4), 1.0)


HEALTHY: Mapping[str, Callable[[Random, int], Floats]] = {
    "falls and scatters": falling,
    "by a power law": lambda random, n: falling(random, n, power=True),
    "each step like the last (rho 0.9)": lambda random, n: falling(random, n, rho=0.9),
    "heavy tails": heavy_tails,
    "spikes": spikes,
    "learnt by heart": epochs,
    "wandering level": wandering,
    "hard and easy data": hard_and_easy,
}


def jump(losses_N: Floats, factor: float) -> Floats:
    """From the fault on, the loss is so many times what it would be."""
    return np.where(np.arange(len(losses_N)) >= FAULT_AT, losses_N * factor, losses_N)


def blow_up(losses_N: Floats) -> Floats:
    """From the fault on, it doubles every 50 steps."""
    since_N = np.clip(np.arange(len(losses_N)) - FAULT_AT, 0, 2000)
    return losses_N * 2.0 ** (since_N / 50)


def not_a_number(losses_N: Floats) -> Floats:
    """From the fault on, it is none."""
    return np.where(np.arange(len(losses_N)) >= FAULT_AT, np.nan, losses_N)


FAULTS: Mapping[str, Callable[[Floats], Floats]] = {
    "no number": not_a_number,
    "four times the loss, at once": lambda losses_N: jump(losses_N, 4.0),
    "twice the loss, at once": lambda losses_N: jump(losses_N, 2.0),
    "doubles every 50 steps": blow_up,
}


def alarm_at(losses_N: Floats) -> int | None:
    """Returns the step of the alarm, if there is one."""
    trend = LossTrend()
    for number, loss in enumerate(losses_N.tolist()):
        trend.add(loss)
        if trend.alarm:
            return number
    return None


def false_alarms(kind: str, runs: int) -> int:
    """Returns in how many runs of a healthy kind there was an alarm."""
    made = (HEALTHY[kind](np.random.default_rng(seed), NUM_STEPS) for seed in range(runs))
    return sum(alarm_at(losses_N) is not None for losses_N in made)


def delays(fault: str, runs: int) -> list[int | None]:
    """Returns after how many steps a fault was seen in each run; `None` where it was not, or too early."""
    seen: list[int | None] = []
    for seed in range(runs):
        losses_N = FAULTS[fault](falling(np.random.default_rng(10_000 + seed), 2 * FAULT_AT))
        at = alarm_at(losses_N)
        seen.append(None if at is None or at < FAULT_AT else at - FAULT_AT)
    return seen


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="simulated runs of each kind")
    runs = parser.parse_args().runs
    print(f"False alarms in {NUM_STEPS} steps ({runs} runs of each kind)\n")
    print("| losses | runs with a false alarm |\n|---|---|")
    counts = {kind: false_alarms(kind, runs) for kind in HEALTHY}
    for kind, count in counts.items():
        print(f"| {kind} | {count} of {runs} |")
    print(f"| all | {sum(counts.values())} of {runs * len(counts)} |")
    print(f"\nFaults that begin at step {FAULT_AT} ({runs} runs of each kind)\n")
    print("| fault | seen | steps until then, median | longest |\n|---|---|---|---|")
    for fault in FAULTS:
        seen = sorted(delay for delay in delays(fault, runs) if delay is not None)
        times = f"{seen[len(seen) // 2]} | {seen[-1]}" if seen else "- | -"
        print(f"| {fault} | {len(seen)} of {runs} | {times} |")


if __name__ == "__main__":
    sys.exit(main())
