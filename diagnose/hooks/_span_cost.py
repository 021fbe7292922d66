"""What one span costs on this machine."""

from __future__ import annotations

from time import perf_counter_ns

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import charged

EVICTING_BYTES = 1 << 21
"""About the size of a core's own cache."""

COLDER = 4.0
"""So many times more does a span cost in a training step, its part of finding the steps included: there the
interpreter's code, its branches and its pages are cold, too. Measured as the difference of loops with and
without us, over the same loop's spans times what is measured here: 25 us a step of six spans of 1.0 us."""


SPANS = 30


def calibrate() -> float:
    """Measures what one span costs here: median nanoseconds of the training thread.

    In a training step a span finds the caches full of the model's data, so they are filled with other data
    before each one. What they cannot show is in `COLDER`.
    """
    recorder = Recorder()
    call = charged(int, recorder, 0)
    other_data = bytearray(EVICTING_BYTES)
    costs = []
    for _ in range(SPANS):
        bytes(other_data)
        begun = perf_counter_ns()
        call()
        costs.append(perf_counter_ns() - begun)
    return float(sorted(costs)[SPANS // 2]) * COLDER
