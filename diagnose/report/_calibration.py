"""How good the predicted gains were, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from diagnose.core.prediction import Prediction
from diagnose.core.units import format_share
from diagnose.report._json import SCHEMA
from diagnose.report._terminal import Terminal
from diagnose.report._text import block_lines
from diagnose.report._wording import plural
from diagnose.report.base import Column, Paragraph, Row, Table

MAX_NOISE_SHARE = 0.5
"""A measurement that is further off than this says nothing about a prediction of 1.2x or of 2x."""

NOTHING = (
    "No fix has been tried yet. Compare a run with one in which a fault is gone, diagnose compare A B, "
    "and what was predicted is noted beside what was measured."
)


def calibration_text(predictions: Sequence[Prediction], terminal: Terminal) -> str:
    """Prints how far predictions were off, all together and rule by rule."""
    clear = clear_ones(predictions)
    blocks: list[Paragraph | Table] = []
    if not predictions:
        blocks.append(Paragraph(text=NOTHING))
    if clear:
        groups = [("all", clear), *by_rules(clear).items()]
        table = Table(
            caption="Predicted beside measured speedup, of fixes that were tried. The error is the median, "
            "as a part of the measured speedup.",
            columns=(
                Column(title="faults that were gone"),
                Column(title="tried", number=True),
                Column(title="error", number=True),
                Column(title="in the interval", number=True),
                Column(title="within noise", number=True),
            ),
            rows=tuple(Row(cells=_cells(name, group)) for name, group in groups),
        )
        blocks.append(table)
    if len(clear) < len(predictions):
        left_out = plural(len(predictions) - len(clear), "measurement")
        blocks.append(
            Paragraph(
                text=f"{left_out} too noisy to count: {100 * MAX_NOISE_SHARE:.0f} % of the speedup or more."
            )
        )
    return "".join(f"{line.rstrip()}\n" for block in blocks for line in block_lines(block, terminal))


def calibration_json(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns the same as JSON; `null` where nothing was tried."""
    clear = clear_ones(predictions)
    groups = by_rules(clear)
    return {
        "schema": SCHEMA,
        **_figures(clear),
        "too_noisy": len(predictions) - len(clear),
        "faults": [{"rules": name.split(", "), **_figures(group)} for name, group in groups.items()],
    }


def clear_ones(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns the predictions whose measurement can say anything about them."""
    return [prediction for prediction in predictions if prediction.noise_share < MAX_NOISE_SHARE]


def by_rules(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Returns the predictions by the faults that were gone together."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(", ".join(sorted(prediction.rules)), []).append(prediction)
    return dict(sorted(groups.items()))


def _figures(predictions: Sequence[Prediction]) -> dict[str, Any]:
    errors = [abs(prediction.error_share) for prediction in predictions]
    return {
        "tried": len(predictions),
        "median_error": median(errors) if errors else None,
        "inside": sum(prediction.is_inside for prediction in predictions),
        "within_noise": sum(prediction.is_within_noise for prediction in predictions),
    }


def _cells(name: str, predictions: Sequence[Prediction]) -> tuple[str, ...]:
    figures = _figures(predictions)
    tried = figures["tried"]
    hits = (f"{figures[key]} of {tried}" for key in ("inside", "within_noise"))
    return (name, f"{tried}", format_share(figures["median_error"]), *hits)
