"""The optimizer updates its tensors one by one"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Optimizer, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_TENSORS = 10
"""With fewer tensors there are few calls to save."""

SAVED = {"Adam": 0.76, "AdamW": 0.76, "NAdam": 0.6, "RAdam": 0.6, "Adagrad": 0.6, "SGD": 0.5}
"""Part of a step of many small tensors that one call for all of them saves. Measured on two CPU cores:
AdamW takes 25 us per tensor one by one and 5 to 7 us fused, SGD with momentum 6.4 and 2.3 us. The
optimizer phase also holds `zero_grad`, which stays."""

SAVED_BY_FOREACH = 0.5
"""On a GPU `foreach` makes a few launches of hundreds; what it saves is at least this."""

LARGE_ELEMENTS = 200_000
"""Tensors above this mean size keep the memory busy, and calls are not what takes the time: fusing then
saves the passes over memory, about half as much."""

LOW, HIGH = 0.6, 1.15
"""The measured savings scatter by this much with the size of the tensors and the number of cores."""


def one(
    kind: str = "AdamW",
    num_tensors: int = 400,
    implementation: str = "for-loop",
    can_fuse: bool = True,
) -> Program:
    optimizer = Optimizer(
        kind=kind,
        num_tensors=num_tensors,
        num_elements=1000 * num_tensors,
        implementation=implementation,
        can_fuse=can_fuse,
    )
    return Program(optimizers=(optimizer,))


class SlowOptimizer(Rule):
    """
    ## What it means
    The optimizer calls torch several times for every parameter tensor. With hundreds of small tensors these
    calls, not the arithmetic, take the time. On a CPU this is torch's default; on a GPU someone asked for
    it.

    ## What to do
    Give the optimizer `fused=True`: one call updates all tensors. Where torch has no fused
    implementation, `foreach=True`.

    ## When it is wrong
    The results of both differ in the last bit. Code that reads or changes the optimizer's state between
    tensors may not expect them.
    """

    needs = ("program.optimizers",)
    actions = ("fused-adamw", "foreach-optimizer")
    fires_on = (
        profile(optimizer_ms=30, program=one()),
        profile(optimizer_ms=8, program=one(kind="SGD")),
    )
    silent_on = (
        profile(optimizer_ms=30, program=one(implementation="fused")),
        profile(optimizer_ms=2, program=one()),
        profile(optimizer_ms=30, program=one(num_tensors=4)),
        profile(optimizer_ms=30, program=one(kind="Mine", implementation="", can_fuse=False)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return any(self._is_slow(optimizer) for optimizer in profile.program.optimizers)

    def _is_slow(self, optimizer: Optimizer) -> bool:
        return optimizer.implementation == "for-loop" and optimizer.num_tensors >= MIN_TENSORS

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        whole = sum(optimizer.num_tensors for optimizer in profile.program.optimizers)
        slow = [optimizer for optimizer in profile.program.optimizers if self._is_slow(optimizer)]
        worst = max(slow, key=lambda optimizer: optimizer.num_tensors)
        on_gpu = any(model.device != "cpu" for model in profile.program.models)
        if not worst.can_fuse and not on_gpu:
            return None  # on a CPU `foreach` saves little
        saved = SAVED.get(worst.kind, SAVED_BY_FOREACH) if worst.can_fuse else SAVED_BY_FOREACH
        if worst.num_elements > LARGE_ELEMENTS * worst.num_tensors:
            saved *= 0.5
        part = sum(optimizer.num_tensors for optimizer in slow) / whole
        time_ns = profile.phase_time_ns.get(Phase.OPTIMIZER, 0.0)
        lost_ns = saved * part * time_ns
        if lost_ns < 0.02 * profile.step_time_ns:
            return None
        option = "fused" if worst.can_fuse else "foreach"
        return Finding(
            rule=self.name,
            summary=f"{worst.kind} updates {worst.num_tensors} tensors one by one.",
            lost_ns={Phase.OPTIMIZER: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, part * time_ns),
            assumption=(
                f"{option}=True saves {format_share(saved)} of the optimizer's time, as measured on CPUs"
            ),
            evidence=(
                f"{format_ms(time_ns)} of each step pass in the optimizer,"
                f" {format_share(time_ns / profile.step_time_ns)} of it.",
                f"{worst.kind} has {worst.num_tensors} tensors of"
                f" {worst.num_elements / worst.num_tensors:,.0f} elements on average and runs as a"
                f" loop over"
                " them.",
            ),
            fix=f"Give {worst.kind} {option}=True.",
            code=f"torch.optim.{worst.kind}(model.parameters(), ..., {option}=True)",
            file=worst.file,
            line=worst.line,
            actions=self.actions,
        )
