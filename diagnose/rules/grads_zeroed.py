"""Gradients are filled with zeros and added to, instead of dropped"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Optimizer, Program
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._device import STREAMING, DeviceRule, sets_the_pace
from diagnose.rules._examples import card, profile

ACCESSES = 4
"""Zeros are written; then the new gradient is read, the zeros too, and the sum is written."""

MIN_SHARE = 0.03

LOW, HIGH = 0.4, 1.5
"""Gradients of small tensors stay in the device's cache, and a launch for each takes longer than zeros."""


def zeroing(param_bytes: int, zeroes: bool = True, views: bool = False) -> Program:
    optimizer = Optimizer(
        kind="SGD",
        num_tensors=20,
        num_elements=param_bytes // 4,
        param_bytes=param_bytes,
        zeroes_grads=zeroes,
    )
    ddp = (Ddp(gradient_as_bucket_view=True),) if views else ()
    return Program(optimizers=(optimizer,), ddp=ddp)


class GradsZeroed(DeviceRule):
    """
    ## What it means
    The loop calls `zero_grad(set_to_none=False)`, or zeroes the gradients itself. Zeros are written to all
    of them, and the backward pass reads these to add to them, where it could just keep what it computed.

    ## What to do
    Call `optimizer.zero_grad()`: dropping the gradients is the default.

    ## When it is wrong
    Code that reads `.grad` before the backward pass, gradients captured in CUDA graphs, or gradients that
    are views of DDP's buckets need their memory to stay. On a CPU it is no fault, and not looked for:
    keeping the gradients was a fifth to a quarter faster there than fetching their memory anew, measured on
    layers of 1024 x 1024. It reads the device's bandwidth and busy share; no run on a GPU has tried it yet.
    """

    needs = ("program.optimizers", "device.bandwidth_bytes_per_s", "device.busy_share")
    fires_on = (
        profile(device=card(bandwidth_bytes_per_s=0.3e12), program=zeroing(400_000_000)),
        profile(device=card(), program=zeroing(4_000_000_000)),
    )
    silent_on = (
        profile(program=zeroing(4_000_000_000)),
        profile(device=card(), program=zeroing(4_000_000_000, zeroes=False)),
        profile(device=card(), program=zeroing(4_000_000_000, views=True)),
        profile(device=card(busy_share=0.3), program=zeroing(4_000_000_000)),
        profile(device=card(), program=zeroing(100_000_000)),
    )

    def applies(self, profile: Profile) -> bool:
        zeroes = any(optimizer.zeroes_grads for optimizer in profile.program.optimizers)
        views = any(ddp.gradient_as_bucket_view for ddp in profile.program.ddp)
        return super().applies(profile) and zeroes and not views

    def check(self, profile: Profile) -> Finding | None:
        rate = profile.device.bandwidth_bytes_per_s
        assert rate is not None
        if not sets_the_pace(profile):
            return None
        zeroing = [optimizer for optimizer in profile.program.optimizers if optimizer.zeroes_grads]
        grad_bytes = sum(optimizer.param_bytes or 0 for optimizer in zeroing)
        whole_ns = 1e9 * ACCESSES * grad_bytes / (STREAMING * rate)
        # A quarter is the zeros, in the optimizer or beside it; the rest is added in the backward pass.
        phases = {Phase.OPTIMIZER: 0.25 * whole_ns, Phase.BACKWARD: 0.75 * whole_ns}
        lost = {phase: min(ns, 0.5 * profile.spent_ns(phase)) for phase, ns in phases.items()}
        lost_ns = sum(lost.values())
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{format_bytes(grad_bytes)} of gradients are filled with zeros in each step.",
            lost_ns=lost,
            low_ns=LOW * lost_ns,
            high_ns=HIGH * lost_ns,
            assumption=f"gradients pass the memory {ACCESSES} times more than they need to",
            evidence=(
                "The parameters still have gradients when a step's first backward pass begins.",
                f"At {format_bytes(rate)} a second, {ACCESSES} times {format_bytes(grad_bytes)} take"
                f" {format_ms(whole_ns)}.",
            ),
            fix="Let zero_grad drop the gradients.",
            code="optimizer.zero_grad()",
            file=zeroing[0].file,
            line=zeroing[0].line,
        )
