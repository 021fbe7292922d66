"""What the source of the script says, read once for all ranks, which run the same lines."""

from __future__ import annotations

from typing import Any

from diagnose.source.idioms import Idioms
from diagnose.source.places import Places
from diagnose.source.roles import Roles
from diagnose.source.sites import anchors_of
from diagnose.source.sources import Sources
from diagnose.store.reader import RankLog


class Script:
    """The source, and what was found out about it so far.

    Attributes:
        sources: Its text.
        places: Its statements.
        idioms: What its lines are there for.
    """

    def __init__(self) -> None:
        self.sources = Sources()
        self.places = Places(self.sources)
        self.idioms = Idioms(self.places)
        self._roles: dict[Any, Roles] = {}

    def roles(self, log: RankLog) -> Roles:
        """Returns what lines between hooks serve on a rank."""
        anchors = anchors_of(log.sites, log.samples)
        if anchors not in self._roles:
            self._roles[anchors] = Roles(log.sites, self.sources, log.samples)
        return self._roles[anchors]
