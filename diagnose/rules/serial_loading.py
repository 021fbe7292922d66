"""The training thread loads its own batches"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import InputStats, Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_SHARE = 0.02
"""Loading that takes less of the step is not worth worker processes."""

HIDDEN = (0.7, 1.0)
"""How much of the loading workers hide: all of it where they keep up, less where CPUs are short."""

ONE_WORKER = Program(loaders=(Loader(num_workers=1, batch_size=32),))
NO_WORKER = Program(loaders=(Loader(num_workers=0, batch_size=32, file="/home/me/train.py", line=31),))


class SerialLoading(Rule):
    """
    ## What it means
    The loader has no workers, so the loop stands still while the training thread itself fetches, decodes
    and collates each batch.

    ## What to do
    Give the loader workers: they prepare the next batches while the model computes on this one.

    ## When it is wrong
    Loading that must run in the main process, or a machine without a CPU to spare: workers then compete
    with the model.
    """

    actions = ("loader-workers",)
    fires_on = (
        profile(data_wait_ms=40, program=NO_WORKER, input=InputStats(fetch_ns=38e6, collate_ns=2e6)),
        profile(data_wait_ms=3, program=NO_WORKER, input=InputStats(fetch_ns=2e6, collate_ns=1e6)),
    )
    silent_on = (
        profile(data_wait_ms=1.9, program=NO_WORKER, input=InputStats(fetch_ns=1e6, collate_ns=0.9e6)),
        profile(data_wait_ms=40, program=ONE_WORKER),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return any(not loader.num_workers for loader in profile.program.loaders)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        share = profile.share(Phase.DATA_WAIT)
        if share is None or share < MIN_SHARE:
            return None
        lost_ns = profile.phase_time_ns[Phase.DATA_WAIT]
        loader = next(loader for loader in profile.program.loaders if not loader.num_workers)
        return Finding(
            rule=self.name,
            summary=f"The training thread loads its own batches: {format_share(share)} of each step.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=HIDDEN[0] * lost_ns,
            high_ns=HIDDEN[1] * lost_ns,
            assumption="workers prepare a batch while the model computes, on CPUs that are free",
            evidence=(f"num_workers=0, and {format_ms(lost_ns)} of each step pass in next(loader).",),
            fix="Give the DataLoader workers.",
            code="DataLoader(..., num_workers=2, persistent_workers=True)",
            file=loader.file,
            line=loader.line,
            actions=self.actions,
        )
