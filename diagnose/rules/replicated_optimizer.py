"""Every rank makes the same update of all parameters"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Optimizer, Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._rank_examples import ranks_example
from diagnose.rules.base import Rule

SHARDED = "ZeroRedundancyOptimizer"

GROUPED = ("foreach", "fused")
"""Updates that leave little to win but by sharing them."""

GATHERED = 0.5
"""Gathering what each rank updated takes half as long as averaging as many gradients did."""

MIN_SHARE = 0.04

LOW, HIGH = 0.5, 1.1
"""Shards are never quite even, and their gathering meets what else is on the link."""


def updating(
    optimizer_ms: float, kind: str = "AdamW", implementation: str = "fused", comm_ms: float = 10.0
) -> Profile:
    optimizer = Optimizer(
        kind=kind,
        num_tensors=200,
        num_elements=10**8,
        implementation=implementation,
        can_fuse=True,
        state_bytes=8 * 10**8,
    )
    program = Program(
        optimizers=(optimizer,),
        ddp=tuple(
            Ddp(
                rank=rank,
                world_size=4,
                backend="nccl",
                param_bytes=4 * 10**8,
                compute_ns=40e6,
                comm_ns=comm_ms * 1e6,
                overlap_ns=0.8e6 * comm_ms,
            )
            for rank in range(4)
        ),
    )
    times = {Phase.FORWARD: 30.0, Phase.BACKWARD: 70.0 - optimizer_ms, Phase.OPTIMIZER: optimizer_ms}
    return ranks_example(*[times] * 4, program=program)


class ReplicatedOptimizer(Rule):
    """
    ## What it means
    The optimizer takes a good part of the step, and all ranks compute the very same update from the same
    gradients.

    ## What to do
    Let each rank update its share and send the result to the others: wrap the optimizer in
    `ZeroRedundancyOptimizer`. Its state takes as much less memory.

    ## When it is wrong
    A slow link: gathering the weights then takes what the update saves. The estimate takes the link's speed
    from DDP's own timers. Optimizers that need all parameters at once, such as LARS with a global norm.
    """

    is_limit = True
    needs = ("program.ddp", "program.optimizers")
    fires_on = (updating(25), updating(14, comm_ms=6))
    silent_on = (
        updating(3),
        updating(25, kind=SHARDED),
        updating(25, comm_ms=60),
        updating(25, implementation="for-loop"),
        updating(25, kind="Own", implementation=""),
    )

    def applies(self, profile: Profile) -> bool:
        return len(profile.program.ddp) > 1 and len(profile.ranks) > 1

    def check(self, profile: Profile) -> Finding | None:
        optimizers, ddp = profile.program.optimizers, profile.program.ddp
        if any(optimizer.kind == SHARDED for optimizer in optimizers):
            return None
        if any(one.implementation not in GROUPED for one in optimizers):
            return None  # a faster update is the cheaper cure
        comm = [rank.comm_ns for rank in ddp if rank.comm_ns]
        spent_ns = min(
            profile.spent_ns(Phase.OPTIMIZER),
            *(rank.phase_time_ns.get(Phase.OPTIMIZER, 0.0) for rank in profile.ranks),
        )
        if len(comm) < len(ddp):
            return None
        gather_ns = GATHERED * min(comm)
        world = max(rank.world_size for rank in ddp)
        lost_ns = spent_ns * (1 - 1 / world) - gather_ns
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        worst = max(optimizers, key=lambda optimizer: optimizer.num_elements, default=None)
        kind = worst.kind if worst else "the optimizer"
        state_bytes = sum(optimizer.state_bytes or 0 for optimizer in optimizers)
        return Finding(
            rule=self.name,
            summary=f"All {world} ranks compute the same update, {format_ms(spent_ns)} of each step.",
            lost_ns={Phase.OPTIMIZER: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, spent_ns),
            assumption=f"1/{world} of the update per rank, and {format_ms(gather_ns)} to gather it",
            evidence=(
                f"{format_share(spent_ns / profile.step_time_ns)} of the step or more is {kind} on every"
                " rank.",
                f"Each rank holds the same {format_bytes(state_bytes)} of its state.",
            ),
            fix=f"Wrap {kind} in ZeroRedundancyOptimizer.",
            code=f"ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.{kind}, ...)",
            file=worst.file if worst else "",
            line=worst.line if worst else 0,
        )
