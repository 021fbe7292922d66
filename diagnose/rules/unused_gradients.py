"""Gradients are computed that nothing uses"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Dropped, Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._compute import shares_of
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, updating
from diagnose.rules.base import WORTH_SHARE, Rule

LOW, HIGH = 0.6, 1.3
"""Besides, the forward pass keeps less."""

BRACKET = (
    "critic.requires_grad_(False)  # before `critic` is called for this pass\n"
    "critic.requires_grad_(True)  # after this pass's backward"
)

TOTAL = Work(num_ops=200, flops=1e10, num_bytes=1e8)


def part_of(part: float, num_ops: int | None) -> Work:
    return Work(
        num_ops=int(200 * part) if num_ops is None else num_ops, flops=1e10 * part, num_bytes=1e8 * part
    )


def unwanted(part: float, num_tensors: int = 60, num_ops: int | None = None) -> Program:
    work = part_of(part, num_ops)
    return Program(graph=Graph(num_nodes=400, total=TOTAL, unwanted=work, num_unwanted_tensors=num_tensors))


def dropped(part: float, num_tensors: int = 14, num_ops: int | None = None, never: bool = False) -> Program:
    work = part_of(part, num_ops)
    told = Dropped(
        num_tensors=num_tensors,
        total=TOTAL,
        unwanted=work,
        never_used=never,
        is_apart=num_ops is None,
        file="/home/me/train.py",
        line=41,
    )
    return Program(graph=Graph(num_nodes=400, total=TOTAL), dropped=told)


class UnusedGradients(Rule):
    """
    ## What it means
    The backward pass goes through layers whose parameters want gradients that are for nothing:

    - parameters that belong to no optimizer, or to a group of one whose learning rate is 0: a frozen
      backbone that was never told so;
    - parameters whose gradients are thrown away before their optimizer steps: a discriminator's loss goes
      back through the generator whose images it judged, an actor's loss through the weights of the critic,
      a loop sets `p.grad = None` for layers that are not to be trained.

    ## What to do
    Call `requires_grad_(False)` on what is not trained, before training, or run it under
    `torch.no_grad()`. With several optimizers, give what one model made to the next as `fake.detach()`
    where the first is not trained by it; and where it is, switch the gradients of the second one's
    parameters off before it is called for that pass, and on again after the backward.

    ## When it is wrong
    Gradients that the script reads itself, without an optimizer of torch's. Nothing is said where the
    optimizers hold copies or shards of all parameters, as with `fully_shard`, nor of gradients that are
    thrown away by writing zeros into them.
    """

    needs = ("program.graph", "program.optimizers")
    fires_on = (
        profile(program=unwanted(0.9)),
        profile(program=unwanted(0.1)),
        profile(program=unwanted(0.3, num_ops=0)),
        profile(program=dropped(0.2)),
        profile(program=dropped(0.1, num_ops=3)),
        profile(program=dropped(0.2, never=True)),
    )
    silent_on = (
        profile(program=unwanted(0, 0)),
        profile(program=unwanted(0.01, 2)),
        profile(other_ms=12, program=unwanted(0.9), where=(at("p -= lr * p.grad", 0.1, "update"),)),
        profile(program=dropped(0, 0)),
        profile(program=dropped(0.01, num_ops=0)),
    )

    def applies(self, profile: Profile) -> bool:
        graph, dropped = profile.program.graph, profile.program.dropped
        never_used = bool(graph and graph.num_unwanted_tensors) and not updating(profile)
        return profile.program.fsdp is None and (never_used or bool(dropped and dropped.num_tensors))

    def check(self, profile: Profile) -> Finding | None:
        graph, dropped = profile.program.graph, profile.program.dropped
        assert graph is not None

        def share_of(seen: Graph | Dropped) -> float:
            return shares_of(seen.unwanted, seen)[Phase.BACKWARD]

        never_used = None if updating(profile) else graph  # else the script may update them itself
        seen = max((each for each in (never_used, dropped) if each is not None), key=share_of)
        share = share_of(seen)
        num_tensors = seen.num_tensors if isinstance(seen, Dropped) else seen.num_unwanted_tensors
        backward_ns = profile.spent_ns(Phase.BACKWARD)
        lost_ns = share * backward_ns
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        thrown_away = seen if isinstance(seen, Dropped) else None
        begun = thrown_away is not None and bool(thrown_away.file)
        num_ops = seen.unwanted.num_ops
        if not thrown_away or thrown_away.never_used:
            fix = "Call requires_grad_(False) on each module that is not trained, before training."
            code = ""
        elif thrown_away.is_apart:
            fix = "Cut the graph where the part begins that this pass is not to train."
            code = "loss = critic(batch.detach())"
        else:
            fix = (
                "Switch the gradients of these parameters off before their module is called for this pass,"
                " not at its backward, and on again after that."
            )
            code = BRACKET
        if thrown_away:
            of_which = "have lost them again before their optimizer steps"
        elif isinstance(seen, Graph) and seen.num_resting_tensors:
            resting = seen.num_resting_tensors
            of_which = f"are in no optimizer, or, as {resting} of them, have a learning rate of 0"
        else:
            of_which = "are in no optimizer"
        parts = (
            f"{num_ops} of {seen.total.num_ops} operations lead to no other"
            if num_ops
            else "The half of each product with them that makes their gradients is for nothing"
        )
        return Finding(
            rule=self.name,
            summary=f"{num_tensors} tensors get gradients that no optimizer uses.",
            lost_ns={Phase.BACKWARD: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, backward_ns),
            assumption="the backward pass takes what it did, but for these operations",
            evidence=(
                f"{num_tensors} tensors that get gradients {of_which}.",
                f"{parts}: {format_share(share)} of the backward pass.",
                f"The backward pass takes {format_ms(backward_ns)} of each step.",
                *(("The line named is where the backward of the pass begins.",) if begun else ()),
            ),
            fix=fix,
            code=code,
            file=thrown_away.file if thrown_away else "",
            line=thrown_away.line if thrown_away else 0,
        )
