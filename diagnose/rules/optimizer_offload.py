"""The optimizer's state lies in host memory, and the update waits for it"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Optimizer, Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._device import ACCESSES, STREAMING, DeviceRule
from diagnose.rules._examples import GIB, card, profile

OFFLOADED = 0.5
"""Part of the state in host memory; Adam's step counter is there by default, a number per tensor."""

MIN_SHARE = 0.05

LOW = 0.6
"""Where the copies were hidden behind the backward pass, less is won."""

ADAM = Optimizer(
    kind="AdamW",
    num_tensors=200,
    num_elements=10**9,
    param_bytes=2 * 10**9,
    state_bytes=8 * 10**9,
    host_state_bytes=8 * 10**9,
)
MODELS = (Model(kind="GPT", device="cuda", param_bytes=2 * 10**9),)
OFFLOADING = Program(optimizers=(ADAM,), models=MODELS)
KEEPING = Program(optimizers=(replace(ADAM, host_state_bytes=800),), models=MODELS)
UNKNOWN = Program(optimizers=(replace(ADAM, host_state_bytes=None), ADAM), models=MODELS)


class OptimizerOffload(DeviceRule):
    """
    ## What it means
    The moments of the optimizer are kept in host memory to save the device's. Each update moves gradients
    and weights over the link, or computes on the CPU, and the device waits.

    ## What to do
    Keep the state on the device: its memory has room for it. If it had none, an 8-bit optimizer or sharding
    the state among the ranks takes a part of it.

    ## When it is wrong
    A batch or a sequence that is still to grow. It reads once, after some steps, where the state lies,
    also that of copies of the parameters which the model does not have; not where a wrapper such as
    `fully_shard` keeps the parameters themselves in host memory. The time to be won goes by the bandwidth
    of the device; no run on a GPU has tried it yet.
    """

    needs = ("program.optimizers", "headroom_bytes", "device.bandwidth_bytes_per_s")
    fires_on = (
        profile(optimizer_ms=40, device=card(), program=OFFLOADING),
        profile(optimizer_ms=30, device=card(peak_bytes=50 * GIB), program=OFFLOADING),
    )
    silent_on = (
        profile(optimizer_ms=40, device=card(), program=KEEPING),
        profile(optimizer_ms=40, device=card(peak_bytes=78 * GIB), program=OFFLOADING),
        profile(optimizer_ms=7, device=card(), program=OFFLOADING),
        profile(optimizer_ms=40, device=card(), program=UNKNOWN),
    )

    def check(self, profile: Profile) -> Finding | None:
        free, rate = profile.headroom_bytes, profile.device.bandwidth_bytes_per_s
        assert free is not None and rate is not None
        optimizers = profile.program.optimizers
        if any(optimizer.host_state_bytes is None for optimizer in optimizers):
            return None  # a run of an older version
        state_bytes = sum(optimizer.state_bytes or 0 for optimizer in optimizers)
        away_bytes = sum(optimizer.host_state_bytes or 0 for optimizer in optimizers)
        if not state_bytes or away_bytes < OFFLOADED * state_bytes or away_bytes > free:
            return None
        param_bytes = sum(optimizer.param_bytes or 0 for optimizer in optimizers)
        there_ns = 1e9 * ACCESSES * (state_bytes + 2 * param_bytes) / (STREAMING * rate)
        spent_ns = profile.phase_time_ns.get(Phase.OPTIMIZER, 0.0)
        lost_ns = spent_ns - there_ns
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{format_bytes(away_bytes)} of optimizer state are in host memory.",
            lost_ns={Phase.OPTIMIZER: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=spent_ns,
            assumption="on the device an update takes as long as reading and writing its state",
            evidence=(
                f"{format_share(away_bytes / state_bytes)} of the state lies in host memory, and the"
                f" optimizer takes {format_ms(spent_ns)} of each step.",
                f"{format_bytes(free)} of the device's memory were never used.",
            ),
            fix="Do not offload the optimizer: its state fits on the device.",
            file=optimizers[0].file,
            line=optimizers[0].line,
        )
