"""How a run went from its first step to its last, coarse enough to be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diagnose.core.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All steps of the first rank in bins that follow each other without gaps, warm-up and trials included.

    Attributes:
        width: Steps per bin, a power of two; the last bin may hold fewer.
        phase_ms: Mean milliseconds per step of each phase that took time, one value per bin.
        samples_per_s: One value per bin; empty where no batch size was read.
    """

    width: int = 1
    phase_ms: Mapping[Phase, tuple[float, ...]] = field(default_factory=dict)
    samples_per_s: tuple[float, ...] = ()
