"""Profiles of ranks, to write the examples of rules with."""

from __future__ import annotations

from typing import Any

from diagnose.core.parallel import Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Program
from diagnose.rules._examples import profile


def meeting(
    *waits_ms: float, last: int, held_ms: float, share: float = 1.0, leads: float = 0.0
) -> Meetings:
    """Ranks that wait so long for gradients; one of them is the last to come in this part of the steps, and
    most often in this part of the run's stretches."""
    rest = (1 - share) / (len(waits_ms) - 1)
    return Meetings(
        num_steps=100,
        wait_ns={rank: ms * 1e6 for rank, ms in enumerate(waits_ms)},
        common_ns=min(waits_ms) * 1e6,
        calm_ns=min(waits_ms) * 1e6,
        last_share={rank: share if rank == last else rest for rank in range(len(waits_ms))},
        held_ns={rank: held_ms * 1e6 if rank == last else 0.0 for rank in range(len(waits_ms))},
        lead_share={last: leads} if leads else {},
    )


def ranks_example(
    *times_ms: dict[Phase, float],
    program: Program | None = None,
    standing_ms: float = 0.0,
    working_ms: float = 0.0,
    exchanged_ms: float | None = 0.0,
    **parts: Any,
) -> Profile:
    """A profile of ranks with these phases; the first, whose are the profile's, stands still so long, and
    works so long on batches that it has, and each waits so long for another one. `parts` as in
    `profile`."""
    ranks = tuple(
        RankProfile(
            rank=rank,
            host="node",
            phase_time_ns={phase: ms * 1e6 for phase, ms in times.items()},
            standing_ns=0.0 if rank else standing_ms * 1e6,
            working_ns=0.0 if rank else working_ms * 1e6,
            exchanged_ns=None if exchanged_ms is None else exchanged_ms * 1e6,
        )
        for rank, times in enumerate(times_ms)
    )
    first: dict[str, Any] = {f"{phase.value}_ms": ms for phase, ms in times_ms[0].items()}
    step_ms = sum(times_ms[0].values())
    return profile(step_ms=step_ms, ranks=ranks, program=program or Program(), **first, **parts)
