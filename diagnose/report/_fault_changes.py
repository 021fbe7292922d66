"""What became of one run's findings in another, and what that says of the promised gain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from diagnose.analysis.recorders import is_untold, measured_otherwise
from diagnose.core.finding import Finding, Gain
from diagnose.core.prediction import Prediction
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_MS, format_gain, format_ms
from diagnose.report.base import Block, Column, Paragraph, Row, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultChanges:
    """The findings of two runs, side by side.

    Attributes:
        before: The first run, its rules asked.
        after: The second run, its rules asked.
        prediction: Predicted beside measured, where faults are gone.
    """

    before: Profile
    after: Profile
    prediction: Prediction | None = None

    @property
    def rows(self) -> list[tuple[str, Finding | None, Finding | None, str]]:
        """Rule, its finding in each run, and what became of it; the most costly first."""
        one = {finding.rule: finding for finding in self.before.findings}
        other = {finding.rule: finding for finding in self.after.findings}
        rules = [*one, *(rule for rule in other if rule not in one)]
        return [(rule, one.get(rule), other.get(rule), self._became(rule, one, other)) for rule in rules]

    def _became(self, rule: str, one: dict[str, Finding], other: dict[str, Finding]) -> str:
        asked = {False: self.before, True: self.after}[rule in one and rule not in other]
        if rule in one and rule in other:
            return "still there"
        if asked.num_rules is None or rule in {silent.rule for silent in asked.abstained}:
            return "cannot tell"
        if is_untold(one.get(rule) or other[rule], measured_otherwise(self.before, self.after)):
            return "cannot tell"
        return "gone" if rule in one else "new"

    def blocks(self) -> list[Block]:
        """Returns a table of the findings and, where there is one, the prediction."""
        table = Table(
            caption="Findings, by what they cost per step.",
            columns=(
                Column(title="fault"),
                Column(title="A", number=True),
                Column(title="B", number=True),
                Column(title="outcome"),
            ),
            rows=tuple(
                Row(cells=(rule, _lost(one), _lost(other), became))
                for rule, one, other, became in self.rows
            ),
        )
        return [table, *([Paragraph(text=_told(self.prediction))] if self.prediction else [])]

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the rows; `null` where a run does not have the finding."""
        return [
            {
                "rule": rule,
                "before_lost_ms_per_step": one and one.lost_ns_per_step / NS_PER_MS,
                "after_lost_ms_per_step": other and other.lost_ns_per_step / NS_PER_MS,
                "outcome": became.replace(" ", "_"),
            }
            for rule, one, other, became in self.rows
        ]


def prediction_json(prediction: Prediction | None) -> dict[str, Any] | None:
    """Returns a prediction as JSON."""
    if prediction is None:
        return None
    return {
        "rules": list(prediction.rules),
        "predicted": asdict(prediction.predicted),
        "measured": asdict(prediction.measured),
        "measured_by": prediction.measured_by,
        "error": prediction.error_share,
        "inside": prediction.is_inside,
    }


def _lost(finding: Finding | None) -> str:
    return "-" if finding is None else format_ms(finding.lost_ns_per_step)


def _told(prediction: Prediction) -> str:
    def words(gain: Gain) -> str:
        return format_gain(gain.speedup, gain.low, gain.high)

    return (
        f"Without {' and '.join(prediction.rules)}, {words(prediction.predicted)} faster was predicted; "
        f"measured: {words(prediction.measured)}."
    )
