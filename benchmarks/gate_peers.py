"""What others' rules say of the pairs that a gate ran: one run before against one run after, as they do.

TraceML's is its own function, asked with the mean step times of the two runs; pytest-benchmark's is its
`--benchmark-compare-fail`; Mann-Whitney's is the rank test on the single steps, at one in a hundred.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gate_simulation import mann_whitney

from diagnose.analysis.profile import load_series
from diagnose.gate.result import Pair

Floats = npt.NDArray[np.float64]
LEVEL = 0.01


def traceml_rule() -> Callable[[Floats, Floats, float], bool] | None:
    """Returns TraceML's rule, where it is installed."""
    try:
        policy = importlib.import_module("traceml_ai.reporting.compare.policy")
    except ImportError:
        return None

    def slower(base: Floats, head: Floats, allowed: float) -> bool:
        percent = 100 * (float(head.mean()) / float(base.mean()) - 1)
        answer = policy.evaluate_step_time_ci_result(delta_pct=percent, threshold_pct=100 * allowed)
        return bool(answer == "SLOWER_IN_THIS_PAIR")

    return slower


def of_benchmark(statistic: Callable[[Floats], float]) -> Callable[[Floats, Floats, float], bool]:
    """Returns pytest-benchmark's rule for one of its statistics."""
    return lambda base, head, allowed: statistic(head) / statistic(base) - 1 > allowed


def rules() -> dict[str, Callable[[Floats, Floats, float], bool]]:
    """Returns each rule by its name: whether it fails the second run."""
    found = {
        "pytest-benchmark mean": of_benchmark(lambda steps: float(steps.mean())),
        "pytest-benchmark min": of_benchmark(lambda steps: float(steps.min())),
        "Mann-Whitney": lambda base, head, allowed: mann_whitney(base, head) < LEVEL,
    }
    traceml = traceml_rule()
    return ({"TraceML compare": traceml} if traceml is not None else {}) | found


def verdicts(pairs: tuple[Pair, ...], allowed: float) -> dict[str, list[bool]]:
    """Returns what each rule says of each pair of runs."""
    said: dict[str, list[bool]] = {name: [] for name in rules()}
    for pair in pairs:
        base, head = (
            np.asarray(load_series(run.folder).step_time_ns, float) for run in (pair.base, pair.head)
        )
        for name, rule in rules().items():
            said[name].append(rule(base, head, allowed))
    return said
