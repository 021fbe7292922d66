"""DDP looks for unused parameters in each pass, and there are none"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph
from diagnose.core.parallel import Ddp, Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration
from diagnose.rules._examples import profile
from diagnose.rules._reductions import made_without, reduces_in
from diagnose.rules.base import WORTH_SHARE, Rule

NS_PER_NODE = 300.0
"""Walking one node of the graph, in C++."""

REDUCTION_NS = {"nccl": 40_000.0, "gloo": 400_000.0}
"""The map of used parameters is reduced over the ranks as well, once per pass."""

SMALL_BYTES = 1 << 20
"""Where no bucket is larger, each takes as long as the map does: neither is held up by its bytes."""

LOW, HIGH = 0.3, 4.0
"""The walk is cheap and the extra reduction waits for the slowest rank."""

LOW_TIMED, HIGH_TIMED = 0.5, 2.0
"""Where the waits for reductions were measured: how much of them is the map's is not."""


def looking(
    num_nodes: int, unused: bool, on: bool = True, waited_ms: float | None = None, *, static: bool = False
) -> Program:
    ddp = Ddp(
        world_size=2,
        backend="gloo",
        bucket_bytes=(250_000,),
        find_unused_parameters=on,
        has_unused=unused,
        static_graph=static,
    )
    met = None
    if waited_ms is not None:
        met = Meetings(num_steps=100, wait_ns={0: 2e6 * waited_ms}, common_ns=1e6 * waited_ms)
    return Program(ddp=(ddp,), graph=Graph(num_nodes=num_nodes), meetings=met)


class FindUnusedParameters(Rule):
    """
    ## What it means
    `find_unused_parameters=True` makes DDP walk the whole graph before each backward pass, and average a
    map of what was used. In the pass looked at, every parameter was used.

    ## What to do
    Leave the option out. `static_graph=True` promises more, a graph that is the same in every step, and is
    worth that only where checkpointing or shared parameters ask for it.

    ## When it is wrong
    Parameters that are used in some steps only. With `static_graph=True` DDP looks for them just once, and
    nothing is said.
    """

    needs = ("program.ddp", "program.graph")
    actions = ("find-unused-off", "static-graph")
    explains = ("exposed-communication",)
    fires_on = (
        profile(step_ms=10, program=looking(2000, unused=False)),
        profile(step_ms=5, program=looking(200, unused=False)),
        profile(communication_ms=10, program=looking(200, unused=False, waited_ms=8)),
    )
    silent_on = (
        profile(step_ms=10, program=looking(2000, unused=True)),
        profile(step_ms=10, program=looking(2000, unused=False, on=False)),
        profile(step_ms=10, program=looking(2000, unused=False, static=True)),
    )

    def applies(self, profile: Profile) -> bool:
        return any(rank.find_unused_parameters and not rank.static_graph for rank in profile.program.ddp)

    def check(self, profile: Profile) -> Finding | None:
        graph, ddp = profile.program.graph, profile.program.ddp
        assert graph is not None
        if graph.num_unreached_tensors or any(rank.has_unused is not False for rank in ddp):
            return None
        walk_ns, passes = NS_PER_NODE * graph.num_nodes, ddp[0].synced_passes
        backward_ns = profile.spent_ns(Phase.BACKWARD)
        waited_ns = _map_waited_ns(profile)
        if waited_ns is None:
            per_pass = walk_ns + REDUCTION_NS.get(ddp[0].backend, REDUCTION_NS["gloo"])
            lost = {Phase.BACKWARD: min(passes * per_pass, 0.5 * backward_ns)}
            low, high, there_ns = LOW, HIGH, backward_ns
            assumption = "an estimate by the size of the graph, not a measurement"
        else:
            per_pass = walk_ns + waited_ns / (passes or 1.0)
            waiting = reduces_in(profile)
            there_ns = sum(profile.spent_ns(phase) for phase in {Phase.BACKWARD, waiting})
            lost = {Phase.BACKWARD: min(passes * walk_ns, 0.5 * backward_ns)}
            lost[waiting] = lost.get(waiting, 0.0) + waited_ns
            low, high = LOW_TIMED, HIGH_TIMED
            assumption = "each of the small reductions of a pass takes the same"
        lost_ns = sum(lost.values())
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary="DDP looks for unused parameters in each pass, and there are none.",
            lost_ns=lost,
            low_ns=low * lost_ns,
            high_ns=max(lost_ns, min(high * lost_ns, there_ns)),
            assumption=assumption,
            evidence=(
                "find_unused_parameters=True, and DDP reports no unused parameter.",
                f"A walk over {graph.num_nodes} nodes and one more reduction take about"
                f" {format_duration(per_pass)}.",
            ),
            fix="Leave find_unused_parameters out.",
            code=made_without(ddp[0], "find_unused_parameters"),
            file=ddp[0].file,
            line=ddp[0].line,
            actions=self.actions,
        )


def _map_waited_ns(profile: Profile) -> float | None:
    """Returns how long a step waits for the map to be reduced; `None` where that cannot be told."""
    meetings, ddp = profile.program.meetings, profile.program.ddp[0]
    if meetings is None or not ddp.bucket_bytes or max(ddp.bucket_bytes) > SMALL_BYTES:
        return None
    return meetings.common_ns / (len(ddp.bucket_bytes) + 1 + ddp.broadcasts_buffers)
