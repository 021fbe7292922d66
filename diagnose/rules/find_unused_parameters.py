"""DDP looks for unused parameters in each pass, and there are none"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

NS_PER_NODE = 300.0
"""Walking one node of the graph, in C++."""

REDUCTION_NS = {"nccl": 40_000.0, "gloo": 400_000.0}
"""The map of used parameters is reduced over the ranks as well, once per pass."""

LOW, HIGH = 0.3, 4.0
"""The walk is cheap and the extra reduction waits for the slowest rank."""


def looking(num_nodes: int, unused: bool, on: bool = True) -> Program:
    ddp = Ddp(world_size=2, backend="gloo", find_unused_parameters=on, has_unused=unused)
    return Program(ddp=(ddp,), graph=Graph(num_nodes=num_nodes))


class FindUnusedParameters(Rule):
    """
    ## What it means
    `find_unused_parameters=True` makes DDP walk the whole graph before each backward pass, and average a
    map of what was used. In the pass looked at, every parameter was used.

    ## What to do
    Leave the option out. `static_graph=True` promises more, a graph that is the same in every step, and is
    worth that only where checkpointing or shared parameters ask for it.

    ## When it is wrong
    Parameters that are used in some steps only.
    """

    needs = ("program.ddp", "program.graph")
    actions = ("find-unused-off", "static-graph")
    fires_on = (
        profile(step_ms=10, program=looking(2000, unused=False)),
        profile(step_ms=5, program=looking(200, unused=False)),
    )
    silent_on = (
        profile(step_ms=10, program=looking(2000, unused=True)),
        profile(step_ms=10, program=looking(2000, unused=False, on=False)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return any(rank.find_unused_parameters for rank in profile.program.ddp)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        graph, ddp = profile.program.graph, profile.program.ddp
        assert graph is not None
        if graph.num_unreached_tensors or any(rank.has_unused is not False for rank in ddp):
            return None
        per_pass = NS_PER_NODE * graph.num_nodes + REDUCTION_NS.get(ddp[0].backend, REDUCTION_NS["gloo"])
        backward_ns = profile.phase_time_ns.get(Phase.BACKWARD, 0.0)
        lost_ns = min((ddp[0].passes_per_step or 1.0) * per_pass, 0.5 * backward_ns)
        if lost_ns < 0.02 * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary="DDP looks for unused parameters in each pass, and there are none.",
            lost_ns={Phase.BACKWARD: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, backward_ns),
            assumption="an estimate by the size of the graph, not a measurement",
            evidence=(
                "find_unused_parameters=True, and DDP reports no unused parameter.",
                f"A walk over {graph.num_nodes} nodes and one more reduction take about"
                f" {format_duration(per_pass)}.",
            ),
            fix="Leave find_unused_parameters out.",
            code="DistributedDataParallel(model)",
            actions=self.actions,
        )
