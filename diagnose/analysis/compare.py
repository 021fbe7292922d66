"""Two runs to a comparison: faster, slower, or cannot tell.

The run, not the step, is the unit of such a comparison. Steps follow each other on the same machine in
the same minutes; tests that take them for independent samples see a difference in a third of all pairs of
identical runs. So a difference counts here only when it exceeds three kinds of noise together: the scatter
inside each run, measured over blocks long enough to hold its correlations; the slow drift inside each run;
and a floor for what differs from run to run and that two single runs cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from diagnose.analysis.recorders import OTHERWISE
from diagnose.core.comparison import Change, Comparison, Unit
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RunInfo
from diagnose.core.units import NS_PER_S

FloatArray = npt.NDArray[np.float64]

RUN_TO_RUN_SD_SHARE = 0.05
"""Standard deviation between runs of the same code that no single run shows, as a part of the value.

Another host of the same kind, other neighbours on it, other memory layout: 2 % on ordinary shared
machines, 5 % on noisy ones. The larger, because the runs do not say on which kind they were made.
"""

PHASE_SHIFT_SHARE = 0.01
"""Part of the step by which a phase's time shifts between runs whatever its own size.

Time moves between neighbouring phases: a batch that is not quite ready, a lazy initialisation elsewhere.
"""

Z_99 = 2.576
"""Normal quantile of a two-sided 99 % interval: of a dozen phases, one in ten comparisons would err."""

T_99 = {8: 3.499, 16: 2.947, 32: 2.744}
"""Student's quantile of a two-sided 99 % interval for the mean of so many blocks."""

MIN_STEPS = 40
"""Steps below which eight blocks of them (five steps each) do not show a run's scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """The measured steps of one run in their order, warm-up left out.

    Attributes:
        step_time_ns: Wall time of each step, shape `(N,)`.
        phase_time_ns: Time of each step that each measured phase took, each of shape `(N,)`.
        samples: Samples of each step, shape `(N,)`; all 0 when no batch size could be read.

    Raises:
        ValueError: If the arrays are not of one length.
    """

    step_time_ns: npt.NDArray[np.int64] | FloatArray
    phase_time_ns: Mapping[Phase, npt.NDArray[np.int64] | FloatArray]
    samples: npt.NDArray[np.int64] | FloatArray

    def __post_init__(self) -> None:
        lengths = {len(self.step_time_ns), len(self.samples), *map(len, self.phase_time_ns.values())}
        if len(lengths) != 1:
            raise ValueError(f"a series of steps needs arrays of one length, not {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.step_time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A quantity of one run: its value, and how far off chance may have put it (99 %)."""

    value: float
    scatter: float
    between_runs: float


def compare(
    before: StepSeries,
    after: StepSeries,
    *,
    notes: tuple[str, ...] = (),
    otherwise: Collection[Phase] = (),
) -> Comparison:
    """Compares two runs of which nothing is known but their steps.

    Args:
        before: The first run, the one that changes are relative to.
        after: The second run.
        notes: What the reader must know of the two; see `differences`.
        otherwise: Phases of which nothing is said; see `recorders.measured_otherwise`.

    Returns:
        One outcome per metric and phase.
    """
    metrics = (
        _change("samples_per_s", Unit.PER_S, before, after, _samples_per_s),
        _change("step_time", Unit.NS, before, after, _median_step),
    )
    measured = [phase for phase in Phase if phase in before.phase_time_ns or phase in after.phase_time_ns]
    changes = (
        (phase, _change(phase.value, Unit.NS, before, after, partial(_mean_phase, phase=phase)))
        for phase in measured
    )
    phases = tuple(
        replace(change, noise=None, reason="measured otherwise") if phase in otherwise else change
        for phase, change in changes
    )
    return Comparison(
        metrics=metrics,
        phases=phases,
        num_steps=(len(before), len(after)),
        notes=(*notes, *([OTHERWISE] if otherwise else []), *_other_batches(before, after)),
    )


def differences(before: RunInfo, after: RunInfo) -> tuple[str, ...]:
    """Says in what two runs differ besides the code: each makes their comparison mean something else."""
    pairs = (
        ("script", before.script, after.script),
        ("arguments", " ".join(before.argv) or "none", " ".join(after.argv) or "none"),
        ("device", before.device, after.device),
        ("ranks", before.world_size, after.world_size),
        ("torch", before.torch, after.torch),
    )
    return tuple(f"not the same {name}: {one} and {other}" for name, one, other in pairs if one != other)


def tuned_parts(before: Profile, after: Profile) -> tuple[str, ...]:
    """Says of tuned runs which of their steps are compared: those of the script as it is."""
    runs = (("first", before), ("second", after))
    return tuple(
        f"the {which} run was tuned: only its {profile.steps.measured:,} steps with nothing changed"
        " are compared"
        for which, profile in runs
        if profile.tuning is not None and profile.tuning.trials and profile.steps.left_out
    )


def _change(
    name: str,
    unit: Unit,
    before: StepSeries,
    after: StepSeries,
    estimate: Callable[[StepSeries], Estimate | None],
) -> Change:
    one, other = estimate(before), estimate(after)
    noise, reason = None, ""
    if one is None or other is None:
        missing = "either run" if one is other else "the first run" if one is None else "the second run"
        reason = f"not measured in {missing}"
    elif min(len(before), len(after)) < MIN_STEPS:
        reason = f"{len(before)} and {len(after)} steps; each run needs {MIN_STEPS}"
    else:
        noise = math.hypot(one.scatter, other.scatter, one.between_runs, other.between_runs)
    return Change(
        name=name,
        unit=unit,
        before=None if one is None else one.value,
        after=None if other is None else other.value,
        noise=noise,
        reason=reason,
    )


def _samples_per_s(steps: StepSeries) -> Estimate | None:
    if not np.any(steps.samples):
        return None
    samples, time_ns = steps.samples.astype(np.float64), steps.step_time_ns.astype(np.float64)

    def rate(part: slice) -> float:
        return float(NS_PER_S * samples[part].sum() / time_ns[part].sum())

    return _estimate(len(steps), rate)


def _median_step(steps: StepSeries) -> Estimate | None:
    if not len(steps):
        return None
    return _estimate(len(steps), lambda part: float(np.median(steps.step_time_ns[part])))


def _mean_phase(steps: StepSeries, phase: Phase) -> Estimate | None:
    time_ns = steps.phase_time_ns.get(phase)
    if time_ns is None or not len(time_ns):
        return None
    shift_ns = PHASE_SHIFT_SHARE * float(np.mean(steps.step_time_ns))
    return _estimate(len(steps), lambda part: float(np.mean(time_ns[part])), shift=shift_ns)


def _estimate(num_steps: int, statistic: Callable[[slice], float], shift: float = 0.0) -> Estimate:
    """Returns the statistic of a run, its scatter over blocks of steps, and its noise from run to run.

    The scatter is the largest that any length of block shows: with blocks shorter than the correlations of
    the steps it comes out too small, never too large. The drift between eighths of a run is not averaged
    away, because another run of the same code may as well have been all like one of them.
    """
    value = statistic(slice(0, num_steps))
    scatter = drift = 0.0
    for num_blocks, quantile in T_99.items():
        if num_steps < 5 * num_blocks:
            continue
        edges = np.linspace(0, num_steps, num_blocks + 1).astype(int)
        blocks = [statistic(slice(low, high)) for low, high in pairwise(edges)]
        spread = float(np.std(blocks, ddof=1))
        scatter = max(scatter, quantile * spread / math.sqrt(num_blocks))
        drift = drift or spread
    between_runs = max(RUN_TO_RUN_SD_SHARE * value, shift, drift)
    return Estimate(value=value, scatter=scatter, between_runs=Z_99 * between_runs)


def _other_batches(before: StepSeries, after: StepSeries) -> tuple[str, ...]:
    """Says so where the steps of the two runs are not the same work."""
    if not np.any(before.samples) or not np.any(after.samples):
        return ()
    one, other = float(np.median(before.samples)), float(np.median(after.samples))
    if math.isclose(one, other, rel_tol=0.01):  # rates of ranks, whose steps differ by microseconds
        return ()
    return (f"not the same samples per step: {one:g} and {other:g}; compare samples/s, not times per step",)
