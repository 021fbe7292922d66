"""The ledger: every phase of the step, and that they add up to it."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_part
from diagnose.report._wording import percent
from diagnose.report.base import Block, Column, Paragraph, PhaseBar, Row, Section, Table


class Phases(Section):
    """Mean time per step of each phase. What was not measured is named, not shown as zero."""

    order = 30
    title = "Where the step goes"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        step_ns = profile.step_time_ns
        if not step_ns:
            return []
        measured = [phase for phase in Phase if phase in profile.phase_time_ns]
        shares = {phase: profile.phase_time_ns[phase] / step_ns for phase in measured}
        rows = [
            Row(
                cells=(phase.label, format_part(profile.phase_time_ns[phase], step_ns), percent(share)),
                phase=phase,
                share=share,
            )
            for phase, share in shares.items()
        ]
        rows.append(Row(cells=("step", format_part(step_ns, step_ns), "100 %")))
        blocks: list[Block] = [
            PhaseBar(shares=shares, title="The mean step, divided into its phases"),
            Table(
                caption="Mean time per measured step. The phases add up to the step.",
                columns=(
                    Column(title="phase"),
                    Column(title="per step", number=True),
                    Column(title="share", number=True),
                ),
                rows=tuple(rows),
            ),
        ]
        missing = ", ".join(phase.label for phase in Phase if phase not in profile.phase_time_ns)
        if missing:
            blocks.append(Paragraph(text=f"Not measured in this run: {missing}."))
        return blocks
