"""Which program ran, where, and how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_S, format_duration
from diagnose.report._wording import outcome, started
from diagnose.report.base import Block, Fact, Facts, Section


class About(Section):
    """The circumstances of the run."""

    order = 90
    title = "This run"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        run = profile.run
        items = [
            Fact(label="command", value=shlex.join([run.script, *run.argv]), code=True),
            Fact(label="ended", value=outcome(run)),
        ]
        if run.started:
            items.append(Fact(label="started", value=started(run)))
        if run.duration_s is not None:
            items.append(Fact(label="took", value=format_duration(run.duration_s * NS_PER_S)))
        items.append(Fact(label="torch", value=run.torch or "not imported"))
        items.append(Fact(label="device", value=run.device))
        if run.world_size > 1:
            items.append(Fact(label="ranks", value=f"{run.world_size}"))
        return [Facts(items=tuple(items))]
