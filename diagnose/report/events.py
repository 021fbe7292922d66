"""What happened now and then, counted over the whole run."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.profile import Profile
from diagnose.report.base import Block, Fact, Facts, Section


class Events(Section):
    """How often the script compiled, saved, collected garbage, ..."""

    order = 70
    title = "Events"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        counts = sorted(profile.events.items(), key=lambda item: (-item[1], item[0]))
        facts = [Fact(label=name.replace("_", " "), value=f"{count:,}") for name, count in counts if count]
        return [Facts(items=tuple(facts))] if facts else []
