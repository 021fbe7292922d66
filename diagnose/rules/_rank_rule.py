"""Rules of what only several ranks can have."""

from __future__ import annotations

from diagnose.core.profile import Profile
from diagnose.rules.base import Rule


class RankRule(Rule):
    """A rule that applies where several ranks were looked at."""

    def applies(self, profile: Profile) -> bool:
        return len(profile.ranks) > 1
