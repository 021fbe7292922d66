"""The training loss over the steps: before anything was changed, while fixes were tried, and after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diagnose.core.history import Loss
from diagnose.core.profile import Profile
from diagnose.core.trial import Tuning
from diagnose.report._charts import Mark, StepBins, StepLines, Vector
from diagnose.report.base import Block, Paragraph, Section
from diagnose.report.phases import changes

FAR = 30.0
"""Times the least loss beyond which the highest hides it."""

OVER = ("ended", "frozen")
"""States in which tuning looks at no further step."""


class TrainingLoss(Section):
    """The loss, where it was recorded: of tuned runs."""

    order = 16
    title = "Training loss"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        loss = profile.history.loss if profile.history is not None else None
        if loss is None:
            return []
        tuning = profile.tuning or Tuning()
        return [
            Paragraph(text=words(loss, tuning, profile.steps.count)),
            curve(loss, tuning, changes(profile), end=profile.steps.count),
        ]


def words(loss: Loss, tuning: Tuning, num_steps: int) -> str:
    """Says what the curve is of, and how the loss before stands to the loss after."""
    said = ["Of the first rank, as its backward passes began."]
    before, after = _mean(loss, tuning.untouched), _mean(loss, tuning.tuned)
    if before is not None and after is not None:
        said.append(f"Mean before anything was changed: {before:.4g}; with all kept fixes: {after:.4g}.")
        said.append("Training went on between.")
    seen = len(loss.means) * loss.width
    if tuning.state in OVER and seen < num_steps - loss.width:
        said.append(f"Tuning ended after some {seen:,} steps, and noted it no longer.")
    return " ".join(said)


def curve(loss: Loss, tuning: Tuning, marks: tuple[Mark, ...], end: int | None = None) -> StepLines:
    """Draws the loss before anything was changed, while fixes were tried, and with all kept fixes."""
    means = np.array(loss.means)
    known = means[np.isfinite(means)]
    far = bool(len(known)) and float(known.min()) > 0 and float(known.max()) > FAR * float(known.min())
    begins = np.arange(len(means)) * loss.width
    before = begins < tuning.untouched[1]
    after = np.zeros(len(means), dtype=bool)
    if tuning.tuned is not None:
        after = ~before & (begins >= tuning.tuned[0]) & (begins < tuning.tuned[1])
    parts = {
        "before anything was changed": before,
        "while fixes were tried": ~before & ~after,
        "with all kept fixes": after,
    }
    return StepLines(
        title="Training loss over the steps, with what tuning did marked",
        unit="loss",
        steps=StepBins(width=loss.width, marks=marks, end=end),
        lines={name: _part(means, chosen) for name, chosen in parts.items() if chosen.any()},
        logarithmic=far,
    )


def _part(means: Vector, chosen: npt.NDArray[np.bool_]) -> Vector:
    """Returns one part of the curve, up to where the next one begins: they are one line."""
    joined = chosen.copy()
    last = int(np.flatnonzero(chosen)[-1])
    joined[last + 1 : last + 2] = True
    return np.where(joined, means, np.nan)


def _mean(loss: Loss, steps: tuple[int, int] | None) -> float | None:
    """Returns the mean over the bins that lie within some steps; `None` without any."""
    if steps is None:
        return None
    means = np.array(loss.means)
    begins = np.arange(len(means)) * loss.width
    within = (begins >= steps[0]) & (begins + loss.width <= steps[1]) & np.isfinite(means)
    return float(means[within].mean()) if within.any() else None
