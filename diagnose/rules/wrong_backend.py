"""Gradients on CUDA devices are averaged through the host"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import profile
from diagnose.rules._reductions import steady_wait_ns

THROUGH_HOST = ("gloo", "mpi")
"""Backends that copy to host memory first; a CUDA-aware MPI is the exception."""

MIN_SHARE = 0.03

LOW, EXPECTED, HIGH = 0.5, 0.85, 1.0
"""NCCL is several times faster between devices of one machine; over a slow network, less so."""


def reducing(backend: str, exposed_ms: float, on_cuda: bool = True) -> Program:
    return Program(
        ddp=tuple(
            Ddp(
                rank=rank,
                world_size=2,
                backend=backend,
                on_cuda=on_cuda,
                param_bytes=400_000_000,
                comm_ns=(exposed_ms + 5) * 1e6,
                overlap_ns=5e6,
                compute_ns=40e6,
                exposed_ns_by_pass=dict.fromkeys(range(4, 10), exposed_ms * 1e6),
            )
            for rank in range(2)
        )
    )


class WrongBackend(DeviceRule):
    """
    ## What it means
    The process group was made for CPUs (`gloo`, `mpi`), and the gradients are on CUDA devices. Each
    reduction copies them to the host, sends them from there, and copies them back.

    ## What to do
    `init_process_group("nccl")`.

    ## When it is wrong
    An MPI that knows CUDA, or a system without NCCL, such as Windows. It reads DDP's own timers; no run on
    a GPU has tried it yet.
    """

    needs = ("program.ddp",)
    explains = ("exposed-communication", "large-buckets", "small-buckets")
    fires_on = (
        profile(device="cuda", program=reducing("gloo", 30)),
        profile(device="cuda", program=reducing("mpi", 8)),
    )
    silent_on = (
        profile(device="cuda", program=reducing("nccl", 30)),
        profile(device="cuda", program=reducing("gloo", 1)),
        profile(program=reducing("gloo", 30, on_cuda=False)),
    )

    def applies(self, profile: Profile) -> bool:
        return super().applies(profile) and any(
            ddp.on_cuda and ddp.backend in THROUGH_HOST for ddp in profile.program.ddp
        )

    def check(self, profile: Profile) -> Finding | None:
        ddp = profile.program.ddp
        steady_ns = steady_wait_ns(ddp)
        if steady_ns is None:
            return None
        waited_ns = min(steady_ns * ddp[0].synced_passes, profile.spent_ns(Phase.BACKWARD))
        if EXPECTED * waited_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Gradients of CUDA devices travel over {ddp[0].backend}, through the host.",
            lost_ns={Phase.BACKWARD: EXPECTED * waited_ns},
            low_ns=LOW * waited_ns,
            high_ns=HIGH * waited_ns,
            assumption="NCCL hides most of the reduction behind the backward pass",
            evidence=(
                f"The parameters are on CUDA devices, and the backend is {ddp[0].backend}.",
                f"Every rank waits {format_ms(waited_ns)} of each step for"
                f" {format_bytes(ddp[0].param_bytes or 0)} of gradients.",
            ),
            fix="Make the process group with NCCL.",
            code='torch.distributed.init_process_group("nccl")',
        )
