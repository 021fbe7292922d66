"""Torch's anomaly detection is on"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.series import NowAndThen
from diagnose.core.units import format_duration, format_share
from diagnose.rules._cpus import stretch_of
from diagnose.rules._examples import profile
from diagnose.rules._now_and_then import (
    MEASURED_BOUNDS,
    in_some_steps,
    of_some_steps,
    steps_with,
)
from diagnose.rules.base import Rule

MIN_PART = 0.5
"""The part of the readings that find it on, of those that could: where it is on around the backward pass
only, those in there. One that is switched on for a few steps is a search for a NaN."""

MIN_READINGS = 0.15
"""Fewer of all readings may be chance."""

BYTE_NS = 0.35
"""CPU time per byte of the results in which NaN is looked for, on one thread: measured, 0.27 to 0.45."""

SPLIT_BYTES, FURTHER, MOST_THREADS = 131_072, 0.5, 4
"""Torch divides the search of a larger result among threads (32,768 numbers to each). Of two the second one
adds half of what the first does, measured with results of 256 KiB to 8 MiB; more than four are not expected
to add anything, as memory sets the pace."""

FORWARD_NS, BACKWARD_NS = 64_000, 12_000
"""What it adds for each node of the graph, measured on a 2-core virtual machine: in the forward pass a
formatted stack, in the backward pass a search for NaN."""

SHARES = {Phase.FORWARD: 0.7, Phase.BACKWARD: 0.4}
"""Where the graph is not known: what it took of models of many small operations."""

MOST = {Phase.FORWARD: 0.9, Phase.BACKWARD: 0.7}

BOUNDS = (0.4, 1.5)
GUESS_BOUNDS = (0.1, 1.2)

ON = HostStats(anomaly_share=1.0)
IN_SOME = in_some_steps("anomaly", {Phase.FORWARD: 6e6, Phase.BACKWARD: 6e6})
IN_BACKWARD = Program(graph=Graph(num_nodes=400, searches_nan=True))
IN_BOTH = Program(graph=Graph(num_nodes=400, searches_nan=True, keeps_stacks=True))


class AnomalyMode(Rule):
    """
    ## What it means
    `torch.autograd.set_detect_anomaly(True)`, or its context manager, is on. For each operation torch keeps
    a formatted stack of Python, and searches each gradient for NaN. Around the backward pass alone it only
    searches.

    ## What to do
    Switch it off. To find where a NaN comes from, switch it on for the steps before it only. Steps in which
    it is on now and then are compared with the others.

    ## When it is wrong
    While you are searching for one.
    """

    needs = ("host.anomaly_share",)
    explains = ("step-jitter",)
    spoils = ("small-operators",)
    fires_on = (
        profile(host=ON),
        profile(host=ON, program=Program(graph=Graph(num_nodes=400))),
        profile(host=HostStats(anomaly_share=0.45), program=IN_BACKWARD),
        profile(host=HostStats(anomaly_share=0.1), series=IN_SOME),
    )
    silent_on = (
        profile(),
        profile(host=HostStats(anomaly_share=0.1)),
        profile(host=HostStats(anomaly_share=0.45)),
        profile(host=HostStats(anomaly_share=0.2), program=IN_BACKWARD),
        profile(host=HostStats(anomaly_share=0.35), program=IN_BOTH),
        profile(host=HostStats(anomaly_share=0.1), series=in_some_steps("anomaly", {})),
        profile(
            host=HostStats(anomaly_share=0.1),
            series=in_some_steps("anomaly", {Phase.FORWARD: 9e6}, times=1),
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        share = profile.host.anomaly_share
        assert share is not None
        found = steps_with("anomaly", profile)
        if found is not None:
            return self._in_some_steps(found, profile) if found.more_ns else None
        graph = profile.program.graph
        around = 1.0  # that part of the step
        if graph is not None and graph.searches_nan:
            phases = tuple(SHARES) if graph.keeps_stacks else (Phase.BACKWARD,)
            around = sum(profile.share(phase) or 0.0 for phase in phases) or 1.0
        if share < max(MIN_READINGS, MIN_PART * around):
            return None
        if graph is not None and graph.num_nodes and not graph.truncated:
            costs = {Phase.FORWARD: FORWARD_NS, Phase.BACKWARD: BACKWARD_NS}
            stretch = stretch_of(profile) * profile.steps.passes * min(1.0, share / around)
            wanted = {phase: stretch * ns * graph.num_nodes for phase, ns in costs.items()}
            if graph.searches_nan and not graph.keeps_stacks:
                del wanted[Phase.FORWARD]
            wanted[Phase.BACKWARD] += stretch * searched_ns(profile, graph)
            bounds, basis = (
                BOUNDS,
                f"each of the graph's {graph.num_nodes} nodes costs what it does elsewhere",
            )
        else:
            wanted = {phase: part * profile.spent_ns(phase) for phase, part in SHARES.items()}
            bounds = GUESS_BOUNDS
            basis = "it takes the part of the step that it takes of small operations"
        lost = {phase: min(ns, MOST[phase] * profile.spent_ns(phase)) for phase, ns in wanted.items()}
        total = sum(lost.values())
        slowed = "forward and backward" if Phase.FORWARD in lost else "the backward pass"
        if not total:
            return None
        return Finding(
            rule=self.name,
            summary=f"Torch's anomaly detection is on, and slows {slowed} down",
            lost_ns=lost,
            low_ns=bounds[0] * total,
            high_ns=bounds[1] * total,
            assumption=basis,
            evidence=(
                f"torch.is_anomaly_enabled() was true in {format_share(share)} of the readings.",
                f"It costs about {format_duration(total)} of each step.",
            ),
            fix="Remove set_detect_anomaly(True), or detect_anomaly(), from the training.",
            code="torch.autograd.set_detect_anomaly(False)",
        )

    def _in_some_steps(self, found: NowAndThen, profile: Profile) -> Finding:
        total_ns = sum(found.more_ns.values())
        return Finding(
            rule=self.name,
            summary=f"Torch's anomaly detection is on in {format_share(found.share)} of the steps, which"
            " take much longer",
            lost_ns=found.more_ns,
            low_ns=MEASURED_BOUNDS[0] * total_ns,
            high_ns=MEASURED_BOUNDS[1] * total_ns,
            assumption="these steps would take as long as the others",
            evidence=(of_some_steps(found),),
            fix="Remove set_detect_anomaly(True), or detect_anomaly(), from the training.",
            code="torch.autograd.set_detect_anomaly(False)",
        )


def searched_ns(profile: Profile, graph: Graph) -> float:
    """Returns what looking for NaN in the results of a pass takes by the clock."""
    work, threads = graph.total, min(MOST_THREADS, profile.host.num_threads or 1)
    if work.num_bytes <= SPLIT_BYTES * work.num_ops:
        threads = 1
    return BYTE_NS * work.num_bytes / (1 + FURTHER * (threads - 1))
