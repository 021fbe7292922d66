"""torch.compile compiles again and again"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Compiler
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules.base import WORTH_SHARE, Rule

MIN_RECOMPILATIONS = 3
"""One for the last, smaller batch and one for evaluation are usual."""

LOW = 0.7
"""Some of the compilations would come at the beginning anyhow."""

AGAIN = Program(
    compiler=Compiler(
        num_compilations=40,
        num_recompilations=39,
        reasons=("tensor 'x' size mismatch at index 1. expected 64, actual 71",),
        file="/home/me/train.py",
        line=12,
        function="forward",
    )
)
ONCE = Program(compiler=Compiler(num_compilations=2, num_recompilations=1))


class Recompilation(Rule):
    """
    ## What it means
    Something that `torch.compile` took for constant keeps changing, a shape or a Python number most
    often, so it compiles the same function anew. After some times it gives up and runs the function
    uncompiled.

    ## What to do
    Mark the changing dimension as dynamic, pad to a few sizes, or pass numbers as tensors. The reasons are
    Dynamo's own.

    ## When it is wrong
    A run so short that its first compilations are most of it.
    """

    needs = ("program.compiler",)
    fires_on = (profile(compile_ms=60, program=AGAIN), profile(compile_ms=4, program=AGAIN))
    silent_on = (profile(compile_ms=60, program=ONCE), profile(program=AGAIN), profile(compile_ms=60))

    def applies(self, profile: Profile) -> bool:
        return profile.spent_ns(Phase.COMPILE) > 0

    def check(self, profile: Profile) -> Finding | None:
        compiler = profile.program.compiler
        assert compiler is not None
        lost_ns = profile.phase_time_ns[Phase.COMPILE]
        if compiler.num_recompilations < MIN_RECOMPILATIONS or lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        name = f"`{compiler.function}`" if compiler.function else "a function"
        gave_up = f" Dynamo gave up on {compiler.limit_hits}." if compiler.limit_hits else ""
        return Finding(
            rule=self.name,
            summary=f"torch.compile compiled again {compiler.num_recompilations} times.",
            lost_ns={Phase.COMPILE: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=lost_ns,
            assumption="compiled once, at the beginning",
            evidence=(
                f"{format_ms(lost_ns)} of the mean step, {format_share(lost_ns / profile.step_time_ns)},"
                " pass in compiling, warm-up left out.",
                f"{compiler.num_compilations} compilations, {compiler.num_recompilations} of them again."
                f"{gave_up}",
                *(f"Dynamo's reason: {reason}" for reason in compiler.reasons[-2:]),
            ),
            fix=f"Keep constant what {name} is compiled for, or say that it changes.",
            code="torch._dynamo.mark_dynamic(x, 1)  # or torch.compile(model, dynamic=True)",
            file=compiler.file,
            line=compiler.line,
        )
