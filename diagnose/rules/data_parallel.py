"""One process drives several devices through DataParallel"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._device import DeviceRule, awaiting_launches
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import STEP

MIN_SHARE = 0.04

LOW, EXPECTED, HIGH = 0.3, 0.7, 1.0
"""Distributed processes launch for themselves and copy no weights, but still average their gradients."""


def parallel(num_replicas: int, wrapped: bool = True) -> Program:
    model = Model(
        kind="ResNet",
        device="cuda",
        num_tensors=160,
        param_bytes=10**8,
        is_data_parallel=wrapped,
        num_replicas=num_replicas if wrapped else 0,
    )
    return Program(models=(model,))


class DataParallel(DeviceRule):
    """
    ## What it means
    `torch.nn.DataParallel` copies the weights to every device in every forward pass, launches all devices'
    kernels from threads of one Python process, which take turns, and gathers all results on the first
    device. The devices wait for one another.

    ## What to do
    One process per device: `DistributedDataParallel` under `torchrun`.

    ## When it is wrong
    A script that must be one process. It reads, from a deep window, how long no device ran a kernel while
    the host was inside an operation, which leaves out that one waits while another computes; no run on a
    GPU has tried it yet.
    """

    needs = ("device.launch_bound_ns",)
    explains = ("launch-bound",)
    fires_on = (
        profile(device=card(busy_share=0.55, launch_bound_ns=35e6), program=parallel(4)),
        profile(device=card(busy_share=0.9, launch_bound_ns=8e6), program=parallel(2)),
    )
    silent_on = (
        profile(device=card(busy_share=0.55, launch_bound_ns=35e6), program=parallel(4, wrapped=False)),
        profile(device=card(busy_share=0.55, launch_bound_ns=35e6), program=parallel(1)),
        profile(device=card(), program=parallel(2)),
    )

    def applies(self, profile: Profile) -> bool:
        return super().applies(profile) and any(
            model.is_data_parallel and model.num_replicas > 1 for model in profile.program.models
        )

    def check(self, profile: Profile) -> Finding | None:
        model = next(model for model in profile.program.models if model.is_data_parallel)
        # What distributed processes would run on all devices at the same time.
        idle = awaiting_launches(profile, STEP)
        whole_ns = sum(idle.values())
        if EXPECTED * whole_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"DataParallel drives {model.num_replicas} devices from one process; they wait for it.",
            lost_ns={phase: EXPECTED * ns for phase, ns in idle.items() if ns},
            low_ns=LOW * whole_ns,
            high_ns=HIGH * whole_ns,
            assumption="a process of its own keeps each device as busy as one alone would be",
            evidence=(
                f"The model is a DataParallel over {model.num_replicas} devices; each step copies"
                f" {format_bytes(model.param_bytes)} of weights to each of them.",
                f"No device runs a kernel for {format_ms(whole_ns)} of each step while the host is inside"
                " an operation.",
            ),
            fix=f"Start the script with torchrun --nproc-per-node={model.num_replicas}, a device for each.",
            code="model = DistributedDataParallel(model.to(rank), device_ids=[rank])",
        )
