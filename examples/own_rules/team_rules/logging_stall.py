"""The step waits for the team's metrics server"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules import Rule, profile

CALL = "metrics.send("
"""Only a line that calls the server proves the cause."""

MIN_SHARE = 0.02
"""Less of the step is not worth a change."""

ERROR_SHARE = 0.3
"""The sampler's share of a line is an estimate; this far off, generously."""


def sending(share: float, text: str = "metrics.send(loss)") -> SourceLine:
    return SourceLine(
        phase=Phase.OTHER, file="/home/me/train.py", line=57, function="main", share=share, text=text
    )


class LoggingStall(Rule):
    """
    ## What it means
    The training thread sends metrics over the network and waits for the answer, in every step.

    ## What to do
    Send every hundredth step, or from a thread of its own.

    ## When it is wrong
    A server that is down only while this run was measured.
    """

    fires_on = (profile(other_ms=12, where=(sending(0.12),)),)
    silent_on = (
        profile(other_ms=1, where=(sending(0.01),)),
        profile(other_ms=12, where=(sending(0.12, "print(loss)"),)),
    )

    def check(self, profile: Profile) -> Finding | None:
        line = next((line for line in profile.where if CALL in line.text and not line.in_worker), None)
        if line is None or line.share < MIN_SHARE:
            return None
        there_ns = profile.phase_time_ns.get(line.phase, 0.0)
        lost_ns = min(line.share * profile.step_time_ns, there_ns)
        return Finding(
            rule=self.name,
            summary=f"Each step waits for the metrics server: {line.share:.0%} of it.",
            lost_ns={line.phase: lost_ns},
            low_ns=(1 - ERROR_SHARE) * lost_ns,
            high_ns=min((1 + ERROR_SHARE) * lost_ns, there_ns),
            assumption="nothing else waits for the answer",
            evidence=(f"The sampler saw `{line.text}` in {line.share:.0%} of the time.",),
            fix="Send the metrics every hundredth step.",
            code="if step % 100 == 0: metrics.send(loss)",
            file=line.file,
            line=line.line,
        )
