"""Gradients are computed for parameters that nothing updates"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._compute import shares_of
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

LOW, HIGH = 0.6, 1.3
"""Besides, the forward pass keeps less."""


def unwanted(part: float, num_tensors: int = 60) -> Program:
    total = Work(num_ops=200, flops=1e10, num_bytes=1e8)
    work = Work(num_ops=int(200 * part), flops=1e10 * part, num_bytes=1e8 * part)
    return Program(graph=Graph(num_nodes=400, total=total, unwanted=work, num_unwanted_tensors=num_tensors))


class UnusedGradients(Rule):
    """
    ## What it means
    The backward pass goes through layers whose parameters want gradients but belong to no optimizer: a
    frozen backbone that was never told so.

    ## What to do
    Call `requires_grad_(False)` on what is not trained, before training; or run it under `torch.no_grad()`.

    ## When it is wrong
    Gradients that the script reads itself, without an optimizer of torch's. Nothing is said where the
    optimizers hold copies or shards of all parameters, as with `fully_shard`.
    """

    needs = ("program.graph", "program.optimizers")
    fires_on = (profile(program=unwanted(0.9)), profile(program=unwanted(0.1)))
    silent_on = (profile(program=unwanted(0, 0)), profile(program=unwanted(0.01, 2)))

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        graph, fsdp = profile.program.graph, profile.program.fsdp
        return fsdp is None and bool(graph and graph.num_unwanted_tensors)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        graph = profile.program.graph
        assert graph is not None
        share = shares_of(graph.unwanted, graph)[Phase.BACKWARD]
        backward_ns = profile.phase_time_ns.get(Phase.BACKWARD, 0.0)
        lost_ns = share * backward_ns
        if lost_ns < 0.02 * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{graph.num_unwanted_tensors} tensors get gradients that no optimizer uses.",
            lost_ns={Phase.BACKWARD: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, backward_ns),
            assumption="the backward pass takes what it did, but for these operations",
            evidence=(
                f"{graph.num_unwanted_tensors} tensors that require gradients are in no optimizer.",
                f"{graph.unwanted.num_ops} of {graph.total.num_ops} operations, {format_share(share)}"
                f" of the work,"
                " lead to no other.",
                f"The backward pass takes {format_ms(backward_ns)} of each step.",
            ),
            fix="Switch gradients off for what is not trained.",
            code="model.backbone.requires_grad_(False)",
        )
