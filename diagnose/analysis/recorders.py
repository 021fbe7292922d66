"""Runs of recorders that do not measure the same: what a difference between them is not a difference of."""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile

OTHERWISE = (
    "one run was recorded by an older diagnose, which took what DDP waits for other ranks' gradients for "
    "backward, or for their buffers for forward: it is communication now, and neither is compared"
)
BUFFERS = 3
"""The first recorder that tells what DDP waits for buffers from the forward pass."""


def measured_otherwise(before: Profile, after: Profile) -> frozenset[Phase]:
    """Returns the phases between which the recorders of two runs divide the same time otherwise."""
    found: set[Phase] = set()
    for older, newer in ((before, after), (after, before)):
        moved = older.run.recorder is None and older.program.meetings is None
        is_concerned = older.run.world_size > 1 and older.run.device == "cpu"
        if moved and is_concerned and newer.program.meetings is not None:
            found |= {Phase.BACKWARD, Phase.COMMUNICATION}
        sent = any(ddp.broadcasts_buffers for ddp in older.program.ddp)
        if sent and (older.run.recorder or 1) < BUFFERS <= (newer.run.recorder or 1):
            found |= {Phase.FORWARD, Phase.COMMUNICATION}
    return frozenset(found)


def is_untold(finding: Finding, otherwise: frozenset[Phase]) -> bool:
    """Whether a finding that only one of two runs has may come of what the recorders divide otherwise."""
    return any(phase in otherwise and lost_ns > 0 for phase, lost_ns in finding.lost_ns.items())
