"""torch.compile is broken into many graphs"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Compiler, Graph, GraphBreak, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration, format_ms
from diagnose.rules._compute import model_ns, of_model, of_work
from diagnose.rules._examples import profile
from diagnose.rules._lines import loop_lines, share_of
from diagnose.rules.base import WORTH_SHARE, Rule

COST_NS = (30_000.0, 120_000.0, 600_000.0)
"""What one break costs a step, forward and backward: guards are checked again, another graph is entered
and its backward, and nothing is fused across it."""

MOST_SHARE = 0.6
"""More of the model's time is never laid to breaks: what is computed remains."""


ENTERED = "CompiledFunctionBackward"
"""Node of a compiled graph: one for each that a pass enters. Of those of a loop that was given up at least
every other one is there for a break."""

NOT_FUSED = (0.3, 1.0, 1.3)
"""Of the time of elementwise operations that follow each other, what fusing them wins. A function that is
not compiled at all loses this above all."""


def broken(num_breaks: int) -> Program:
    breaks = tuple(
        GraphBreak(reason="call to print", file="/home/me/model.py", line=line)
        for line in range(1, 1 + num_breaks)
    )
    return Program(compiler=Compiler(num_compilations=1 + num_breaks, breaks=breaks))


def given_up(num_pointwise: int, entered: int = 0) -> Program:
    place = GraphBreak(reason="call to print", file="/home/me/model.py", line=12)
    chained = Work(num_ops=num_pointwise, num_bytes=1e5 * num_pointwise)
    product = Work(num_ops=1, flops=1e8)
    total = Work(num_ops=num_pointwise + 1, flops=product.flops, num_bytes=chained.num_bytes)
    graph = Graph(num_nodes=60, total=total, pointwise=chained, names={ENTERED: entered})
    return Program(compiler=Compiler(num_compilations=1, skipped=(place,)), graph=graph)


class GraphBreaks(Rule):
    """
    ## What it means
    A compiled function holds something that `torch.compile` cannot compile, such as `print` or `.item()`.
    It goes back to Python there, and begins a new graph behind it. Inside a loop it cannot: the whole
    function then runs uncompiled, without a word.

    ## What to do
    Take what breaks the graph out of the model. `torch.compile(fullgraph=True)` fails at the first break
    and so finds them all.

    ## When it is wrong
    Large graphs on either side of a break: then it costs next to nothing. A backend that fuses nothing,
    such as `eager`. What a function that was given up would win is taken to be the elementwise operations
    of the whole model that could be fused, and the line that breaks it.
    """

    needs = ("program.compiler",)
    explains = ("host-sync", "logging-io", "python-overhead")
    fires_on = (
        profile(step_ms=4, program=broken(4)),
        profile(step_ms=2, program=broken(1)),
        profile(step_ms=10, program=given_up(30)),
        profile(step_ms=17, program=given_up(1, entered=33)),
    )
    silent_on = (
        profile(step_ms=100, program=broken(1)),
        profile(step_ms=1, program=broken(0)),
        profile(step_ms=10, program=given_up(1)),
        profile(step_ms=17, program=given_up(1, entered=2)),
    )

    def applies(self, profile: Profile) -> bool:
        return profile.program.compiler is not None

    def check(self, profile: Profile) -> Finding | None:
        compiler = profile.program.compiler
        assert compiler is not None
        places = tuple(dict.fromkeys((*compiler.skipped, *compiler.breaks)))
        num_breaks = len(compiler.breaks)
        whole = model_ns(profile)
        graph = profile.program.graph
        entered = graph.names.get(ENTERED, 0) if graph and compiler.skipped else 0
        num_times = max(num_breaks, entered / 2) * profile.steps.passes
        unfused_ns = (
            sum(of_work(profile, graph.pointwise, graph).values()) if graph and compiler.skipped else 0.0
        )
        places_known = {(found.file, found.line) for found in places if found.file}
        lines = loop_lines(
            profile, lambda line: line.phase is Phase.FORWARD and (line.file, line.line) in places_known
        )
        breaking_ns = share_of(lines) * profile.step_time_ns
        low, expected, high = (
            min(num_times * cost + part * unfused_ns + breaking_ns, MOST_SHARE * whole)
            for cost, part in zip(COST_NS, NOT_FUSED, strict=True)
        )
        if not places or expected < WORTH_SHARE * profile.step_time_ns:
            return None
        lost = dict(of_model(profile, max(0.0, expected - breaking_ns) / whole))
        lost[Phase.FORWARD] += min(breaking_ns, expected)
        counted = f"{len(places)} places" if len(places) > 1 else "one place"
        first = next((found for found in places if found.file), places[0])
        given_up = ", and leaves a function uncompiled" if compiler.skipped else ""
        return Finding(
            rule=self.name,
            summary=f"torch.compile breaks its graph in {counted}{given_up}.",
            lost_ns=lost,
            low_ns=low,
            high_ns=high,
            assumption=(
                f"a break costs {format_duration(COST_NS[0])} to {format_duration(COST_NS[2])} each time"
                if num_times
                else "compiled, elementwise operations that follow each other cost nothing"
            ),
            evidence=(
                *(
                    f"{found.file}:{found.line}: {found.reason}" if found.file else found.reason
                    for found in places[:3]
                ),
                *((f"Each pass enters {entered} compiled graphs.",) if entered else ()),
                *((f"These lines take {format_ms(breaking_ns)} of each step.",) if breaking_ns else ()),
            ),
            fix="Take what breaks the graph out of the compiled function.",
            code="torch.compile(model, fullgraph=True)  # fails at the first break",
            file=first.file,
            line=first.line,
        )
