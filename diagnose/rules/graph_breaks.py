"""torch.compile is broken into many graphs"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Compiler, GraphBreak
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration
from diagnose.rules._compute import model_ns, of_model
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

COST_NS = (30_000.0, 120_000.0, 600_000.0)
"""What one break costs a step, forward and backward: guards are checked again, another graph is entered
and its backward, and nothing is fused across it."""

MOST_SHARE = 0.6
"""More of the model's time is never laid to breaks: what is computed remains."""


def broken(num_breaks: int) -> Program:
    breaks = tuple(
        GraphBreak(reason="call to print", file="/home/me/model.py", line=line)
        for line in range(1, 1 + num_breaks)
    )
    return Program(compiler=Compiler(num_compilations=1 + num_breaks, breaks=breaks))


class GraphBreaks(Rule):
    """
    ## What it means
    A compiled function holds something that `torch.compile` cannot compile, such as `print` or `.item()`.
    It goes back to Python there, and begins a new graph behind it.

    ## What to do
    Take what breaks the graph out of the model. `torch.compile(fullgraph=True)` fails at the first break
    and so finds them all.

    ## When it is wrong
    Large graphs on either side of a break: then it costs next to nothing.
    """

    needs = ("program.compiler",)
    fires_on = (profile(step_ms=4, program=broken(4)), profile(step_ms=2, program=broken(1)))
    silent_on = (profile(step_ms=100, program=broken(1)), profile(step_ms=1, program=broken(0)))

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return profile.program.compiler is not None

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        compiler = profile.program.compiler
        assert compiler is not None
        num_breaks = len(compiler.breaks)
        whole = model_ns(profile)
        low, expected, high = (min(num_breaks * cost, MOST_SHARE * whole) for cost in COST_NS)
        if not num_breaks or expected < 0.02 * profile.step_time_ns:
            return None
        counted = f"{num_breaks} places" if num_breaks > 1 else "one place"
        first = next((found for found in compiler.breaks if found.file), compiler.breaks[0])
        return Finding(
            rule=self.name,
            summary=f"torch.compile breaks its graph in {counted}.",
            lost_ns=of_model(profile, expected / whole),
            low_ns=low,
            high_ns=high,
            assumption=(
                f"a break costs {format_duration(COST_NS[0])} to {format_duration(COST_NS[2])} each time"
            ),
            evidence=tuple(
                f"{found.file}:{found.line}: {found.reason}" if found.file else found.reason
                for found in compiler.breaks[:3]
            ),
            fix="Take what breaks the graph out of the compiled function.",
            code="torch.compile(model, fullgraph=True)  # fails at the first break",
            file=first.file,
            line=first.line,
        )
