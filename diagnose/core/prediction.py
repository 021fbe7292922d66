"""What a finding promised, beside what was measured once its fault was gone."""

from __future__ import annotations

from dataclasses import dataclass

from diagnose.core.finding import Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A pair of runs between which faults disappeared.

    Attributes:
        rules: The rules whose findings the first run has and the second has not.
        predicted: How much faster the first run's findings said training would be without all of them.
        measured: How much faster the second run was, with the noise of two single runs as its interval.
        measured_by: The quantity that was compared: `samples_per_s` or `step_time`.
        before: Name and start of the first run.
        after: Name and start of the second run.
        noted_unix: When the two were compared, in seconds since 1970.
    """

    rules: tuple[str, ...]
    predicted: Gain
    measured: Gain
    measured_by: str
    before: str
    after: str
    noted_unix: float

    @property
    def is_inside(self) -> bool:
        """Whether the measured speedup lies in the predicted interval."""
        return self.predicted.low <= self.measured.speedup <= self.predicted.high

    @property
    def is_within_noise(self) -> bool:
        """Whether the two intervals overlap: the runs do not contradict the prediction."""
        return self.predicted.low <= self.measured.high and self.measured.low <= self.predicted.high

    @property
    def noise_share(self) -> float:
        """Half the width of the measured interval, as a part of the measured speedup."""
        return (self.measured.high - self.measured.low) / 2 / self.measured.speedup

    @property
    def error_share(self) -> float:
        """How far the prediction was off, as a part of the measured speedup; above 0 too high."""
        return self.predicted.speedup / self.measured.speedup - 1
