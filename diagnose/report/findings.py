"""What slows the run down, what proves it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.report._faults import (
    gain,
    gain_in_words,
    headline,
    in_force,
    is_gone,
    lost,
    lost_share,
    no_fault,
    ranks,
    unheard,
)
from diagnose.report._wording import place
from diagnose.report.base import Block, Card, Fact, Paragraph, Section
from diagnose.report.summary import sentence


class Findings(Section):
    """Named faults, the most costly first; or that none was found."""

    order = 20
    title = "What slows it down"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        nothing = no_fault(profile)
        if nothing:
            more = unheard(profile)
            return [Paragraph(text=" ".join(sentence(each) for each in (nothing, more) if each))]
        return [card(finding, profile) for finding in profile.findings]


def _done(finding: Finding, profile: Profile) -> str:
    fixes = " and ".join(in_force(finding, profile))
    if fixes:
        return f"Tuning has put {fixes} in force. By hand: "
    return (
        "With what tuning has kept it is not found any more. By hand: " if is_gone(finding, profile) else ""
    )


def card(finding: Finding, profile: Profile) -> Card:
    """Returns what the report says of one finding."""
    phases = sorted(finding.lost_ns, key=lambda phase: -finding.lost_ns[phase])
    names = ", ".join(phase.label for phase in phases if finding.lost_ns[phase])
    return Card(
        title=headline(finding),
        tags=tuple(tag for tag in (finding.rule, place(finding), ranks(finding)) if tag),
        facts=(
            Fact(
                label="lost",
                value=lost(finding),
                detail=f"per step, {lost_share(finding, profile)} of it: {names}",
            ),
            Fact(label="gain", value=gain(finding, profile), detail=gain_in_words(finding, profile)),
        ),
        points=finding.evidence,
        advice=f"{_done(finding, profile)}{finding.fix}",
        code=finding.code,
        caveat=f"The gain assumes: {finding.assumption}.",
    )
