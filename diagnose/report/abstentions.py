"""Rules that could not be asked: what was not measured is not healthy."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.profile import Profile
from diagnose.report.base import Block, Column, Row, Section, Table


class Abstentions(Section):
    """Each reading that was missing, with the rules that could not do without it."""

    order = 75
    title = "Faults that could not be looked for"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        if not profile.abstained:
            return []
        rules: dict[str, list[str]] = {}
        for abstention in profile.abstained:
            rules.setdefault(abstention.missing, []).append(abstention.rule)
        return [
            Table(
                caption="A reading that these rules need was not taken in this run.",
                columns=(Column(title="reading", code=True), Column(title="rules")),
                rows=tuple(Row(cells=(missing, ", ".join(names))) for missing, names in rules.items()),
            )
        ]
