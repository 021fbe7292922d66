"""Saving the state stops the loop"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, alone, at, doing, explained_where_alone, lost_of, named, rhythm
from diagnose.rules._machine import disk
from diagnose.rules.base import Rule

MIN_SHARE = 0.03
"""A checkpoint each epoch takes less in a healthy run."""

LEAST = 0.7
"""An asynchronous save still copies the state before training goes on."""

ON_CPU = "threading.Thread(target=torch.save, args=(copy.deepcopy(state), path)).start()"
ON_DEVICE = (
    "buffer = io.BytesIO(); torch.save(state, buffer);"
    " threading.Thread(target=pathlib.Path(path).write_bytes, args=(buffer.getbuffer(),)).start()"
)
"""A copy on the device could be more than it has room for."""

EVERY_20 = Series(
    spike_ns={Phase.CHECKPOINT: 10e6}, spike_share={Phase.CHECKPOINT: 0.05}, period={Phase.CHECKPOINT: 20}
)


class CheckpointStall(Rule):
    """
    ## What it means
    Every so many steps the loop stands still until the model and the optimizer are serialized and written.

    ## What to do
    Save in the background: copy the state to the CPU, and let a thread write the copy with `torch.save`.
    `torch.distributed.checkpoint.async_save` does both, but writes a folder that `torch.load` cannot read:
    `torch.distributed.checkpoint.load` does. Or save less often: a checkpoint is worth the work that a
    crash would lose, not more.

    ## When it is wrong
    Short intervals on machines that are taken away without warning.
    """

    explains = (STRAGGLER,)
    fires_on = (
        profile(checkpoint_ms=10, series=EVERY_20, events={"checkpoint": 25}),
        profile(other_ms=5, where=(at("pickle.dump(state, file)", 0.04, "save"),)),
    )
    silent_on = (profile(), profile(checkpoint_ms=2.9), profile(evaluation_ms=10), profile(other_ms=10))

    def explained(self, finding: Finding, profile: Profile) -> tuple[str, ...]:
        return explained_where_alone(self.explains, finding, profile)

    def check(self, profile: Profile) -> Finding | None:
        own = doing(profile, "save")
        lost = lost_of(profile, own)
        if Phase.CHECKPOINT in profile.phase_time_ns:
            lost[Phase.CHECKPOINT] = profile.phase_time_ns[Phase.CHECKPOINT]
        total = sum(lost.values())
        if total < MIN_SHARE * profile.step_time_ns:
            return None
        lines = tuple(
            line for line in profile.where if line.phase is Phase.CHECKPOINT and not line.in_worker
        )
        blamed: SourceLine | None = next(iter((*lines, *own)), None)
        often = rhythm(profile, Phase.CHECKPOINT)
        evidence = [f"{format_ms(total)} of each step, on average, pass in saving{often}."]
        if blamed is not None:
            evidence.append(f"Most of it in {named(blamed)}, {blamed.function}.")
        period = profile.series.period.get(Phase.CHECKPOINT)
        rarer = f", or every {10 * period} steps instead of {period}" if period else ", or less often"
        return Finding(
            rule=self.name,
            summary=f"Saving takes {format_share(total / profile.step_time_ns)} of the time{often}",
            lost_ns={phase: ns for phase, ns in lost.items() if ns},
            low_ns=LEAST * total,
            high_ns=total,
            assumption="a copy of the state is written while training goes on",
            evidence=(*evidence, *alone(profile, lost), *disk(profile.host)),
            fix=f"Save a copy of the state in the background{rarer}.",
            code=ON_CPU if profile.run.device == "cpu" else ON_DEVICE,
            file=blamed.file if blamed else "",
            line=blamed.line if blamed else 0,
            actions=self.actions,
        )
