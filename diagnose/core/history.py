"""How a run went from its first step to its last, coarse enough to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diagnose.core.phases import Phase

LOSS = "loss"
"""What a rank's file calls the losses that it noted (`tuner.loss_curve`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Quantities of one unit over the run's clock.

    Attributes:
        seconds: From the end of the run's first step, ascending.
        values: By name, one per second; NaN where one was not measured.
    """

    seconds: tuple[float, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The training loss of the first rank, in bins that begin at step 0.

    Attributes:
        width: Steps per bin.
        means: Mean loss of each bin; NaN where none was noted.
    """

    width: int
    means: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRanks:
    """How long the others wait for each rank, over the measured steps.

    Attributes:
        ranks: Their numbers.
        first: The first step of the first bin, from 0.
        width: Measured steps per bin; steps that were left out are in none.
        late_ns: Of each rank, nanoseconds per step of each bin; NaN where it recorded nothing.
    """

    ranks: tuple[int, ...]
    first: int
    width: int
    late_ns: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All steps of the first rank in bins that follow each other without gaps, warm-up and trials included.

    Attributes:
        width: Steps per bin, a power of two; the last bin may hold fewer.
        phase_ms: Mean milliseconds per step of each phase that took time, one value per bin.
        samples_per_s: One value per bin; empty where no batch size was read.
        memory_bytes: Memory of the training process, and what it has of the device's.
        cpus: CPUs in use: by training, by its workers, by all programs together.
        device_percent: What the device's driver says, 0 to 100.
        loss: The training loss; `None` where it was not recorded.
        late: How the ranks differ; `None` with one.
    """

    width: int = 1
    phase_ms: Mapping[Phase, tuple[float, ...]] = field(default_factory=dict)
    samples_per_s: tuple[float, ...] = ()
    memory_bytes: Readings = Readings()
    cpus: Readings = Readings()
    device_percent: Readings = Readings()
    loss: Loss | None = None
    late: LateRanks | None = None
