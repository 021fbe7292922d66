"""Rules of what only a loop that workers feed can have. A rule's page lists this file's thresholds, too."""

from __future__ import annotations

from typing import ClassVar

from diagnose.core.profile import Profile
from diagnose.rules._supply import main_loader
from diagnose.rules.base import Rule


class WorkerRule(Rule):
    """A rule that applies where worker processes feed the loop."""

    min_workers: ClassVar[int] = 1

    def applies(self, profile: Profile) -> bool:
        loader = main_loader(profile)
        return loader is not None and loader.num_workers >= self.min_workers
