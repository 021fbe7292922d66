"""Matrix products run in float32, past the tensor cores"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_share
from diagnose.rules._device import DeviceRule, busy_ns, computes_in, kernel_share, sets_the_pace
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import shared

TENSOR_CORES = (8, 0)
"""The first capability whose tensor cores take float32 numbers, as TF32."""

SAVED = (0.5, 0.75, 0.87)
SAVED_BY_FEW = (0.05, 0.35, 0.6)
DATA_CENTER = ((8, 0), (9, 0), (10, 0), (10, 3))
"""What TF32 saves of the products' time. Cards for data centers have eight times the rate in TF32 by their
data sheets, of which two to seven arrive; the others have once or twice it."""

FLOAT32 = 4
"""Bytes of a number. Products of fewer were computed by autocast, entered somewhere inside the model."""

MIN_SHARE = 0.03


def products(
    dtype: str = "float32", flops: float = 2e12, conv_flops: float = 0.0, product_bytes: int | None = None
) -> Program:
    graph = Graph(
        num_nodes=400,
        product_bytes=product_bytes,
        total=Work(num_ops=200, flops=flops, num_bytes=20e9),
        convolutions=Work(num_ops=50 if conv_flops else 0, flops=conv_flops),
    )
    model = Model(kind="Net", device="cuda", param_bytes=10**8, dtypes={dtype: 10**8})
    return Program(graph=graph, models=(model,))


class Fp32Matmul(DeviceRule):
    """
    ## What it means
    The model is float32, autocast is off, and torch may not use TF32 (its default for matrix products). The
    tensor cores, by far the fastest part of the device, stand idle.

    ## What to do
    `torch.set_float32_matmul_precision("high")` before the loop: products keep the range of float32 and
    about three decimal digits. Autocast in bfloat16 is faster still.

    ## When it is wrong
    Work that needs the digits. Convolutions use TF32 by default and are not counted. It reads the
    capability, the settings of TF32 and autocast and the busy share of the device; no run on a GPU has
    tried it yet.
    """

    needs = (
        "program.graph",
        "device.capability",
        "device.tf32",
        "device.autocast_dtype",
        "device.busy_share",
    )
    actions = ("tf32-matmul", "autocast-bf16", "autocast-fp16")
    fires_on = (
        profile(device=card(tf32=False), program=products()),
        profile(device=card(tf32=False, capability=(8, 6)), program=products()),
        profile(device=card(tf32=False, matmul_share=0.3), program=products()),
        profile(device=card(tf32=False, cudnn_tf32=False), program=products(conv_flops=2e12)),
    )
    silent_on = (
        profile(device=card(), program=products()),
        profile(device=card(tf32=False), program=products("bfloat16")),
        profile(device=card(tf32=False), program=products(product_bytes=2)),
        profile(device=card(tf32=False, autocast_dtype="bfloat16"), program=products()),
        profile(device=card(tf32=False, capability=(7, 5)), program=products()),
        profile(device=card(tf32=False, busy_share=0.3), program=products()),
        profile(device=card(tf32=False), program=products(flops=1e9)),
        profile(device=card(tf32=False), program=products(conv_flops=2e12)),
    )

    def check(self, profile: Profile) -> Finding | None:
        device, graph = profile.device, profile.program.graph
        assert graph is not None and device.capability is not None
        if device.tf32 or device.capability < TENSOR_CORES or computes_in(profile) != "float32":
            return None
        if graph.product_bytes not in (None, FLOAT32) or not sets_the_pace(profile):
            return None
        # Whether convolutions may use TF32 is a setting of its own, on by default.
        spared = 0.0 if device.cudnn_tf32 is False else graph.convolutions.flops
        share = kernel_share(profile, graph, Work(flops=graph.total.flops - spared))
        if share is None:
            return None
        low, expected, high = SAVED if device.capability in DATA_CENTER else SAVED_BY_FEW
        spent_ns = share * busy_ns(profile)
        if expected * spent_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Products in plain float32 take {format_share(share)} of the device's time.",
            lost_ns=shared(profile, expected * spent_ns),
            low_ns=low * spent_ns,
            high_ns=high * spent_ns,
            assumption=f"TF32 saves {format_share(expected)} of the time of products on such a card",
            evidence=(
                "The parameters and the products are float32, and these products may not use TF32.",
                f"{device.name or 'The device'} has capability {device.capability[0]}."
                f"{device.capability[1]}: its tensor cores take TF32.",
                f"Kernels run {format_share(device.busy_share or 0.0)} of the time; products are"
                f" {format_share(share)} of that.",
            ),
            fix="Allow TF32 before the loop.",
            code='torch.set_float32_matmul_precision("high")',
            actions=self.actions,
        )
