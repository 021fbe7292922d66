"""Rules of what only a run on an accelerator can have."""

from __future__ import annotations

from diagnose.core.profile import Profile
from diagnose.rules.base import Rule


class DeviceRule(Rule):
    """A rule that does not apply to a run on the CPU."""

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return profile.run.device != "cpu"
