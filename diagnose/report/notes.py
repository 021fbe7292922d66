"""What the reader must know: what was switched off, what was lost."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.profile import Profile
from diagnose.report.base import Block, Paragraph, Section


class Notes(Section):
    """The run's notes, word for word."""

    order = 80
    title = "Notes"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        return [Paragraph(text=note) for note in profile.notes]
