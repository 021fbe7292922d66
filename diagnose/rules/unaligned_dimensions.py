"""Sizes of products are no multiples of 8, which slows the tensor cores down"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_share
from diagnose.rules._device import DeviceRule, busy_ns, computes_in, kernel_share, sets_the_pace
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import shared

HALF = ("float16", "bfloat16")
FIRST = (7, 0)
"""Types, and the first capability, for which tensor cores want multiples of 8."""

SAVED = (0.1, 0.4, 0.7)
"""What padding saves of these products: before cuBLAS 11 they left the tensor cores altogether; since then
they lose a tenth to two thirds."""

MIN_SHARE = 0.03


def products(unaligned: float, dtype: str = "bfloat16") -> Program:
    flops = 6e12
    graph = Graph(
        num_nodes=400,
        total=Work(num_ops=200, flops=flops, num_bytes=20e9),
        unaligned=Work(num_ops=1, flops=unaligned * flops),
    )
    model = Model(kind="GPT", device="cuda", param_bytes=10**8, dtypes={dtype: 10**8})
    return Program(graph=graph, models=(model,))


class UnalignedDimensions(DeviceRule):
    """
    ## What it means
    Products in half precision have a dimension that is no multiple of 8, such as a vocabulary of 50257.
    Tensor cores work on blocks of 8 numbers, and such products fall back to slower kernels.

    ## What to do
    Pad the dimension: a vocabulary of 50304, hidden sizes in multiples of 64. The padded rows are never
    used.

    ## When it is wrong
    A newer cuBLAS may pad by itself. Sizes that are inputs, such as the length of a sequence, change from
    batch to batch. It reads the graph, and the capability, the busy share and the products' share of time
    of the device; no run on a GPU has tried it yet.
    """

    needs = ("program.graph", "device.capability", "device.busy_share", "device.matmul_share")
    fires_on = (
        profile(device=card(matmul_share=0.7), program=products(0.3)),
        profile(device=card(matmul_share=0.6, autocast_dtype="float16"), program=products(0.5, "float32")),
    )
    silent_on = (
        profile(device=card(matmul_share=0.7), program=products(0.0)),
        profile(device=card(matmul_share=0.7), program=products(0.5, "float32")),
        profile(device=card(matmul_share=0.7, busy_share=0.4), program=products(0.3)),
        profile(device=card(matmul_share=0.7, capability=(6, 1)), program=products(0.3)),
    )

    def check(self, profile: Profile) -> Finding | None:
        device, graph = profile.device, profile.program.graph
        assert graph is not None and device.capability is not None
        if device.capability < FIRST or computes_in(profile) not in HALF or not sets_the_pace(profile):
            return None
        share = kernel_share(profile, graph, graph.unaligned)
        assert share is not None
        low, lost_ns, high = (part * share * busy_ns(profile) for part in SAVED)
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{graph.unaligned.num_ops} products have sizes that tensor cores are slow with.",
            lost_ns=shared(profile, lost_ns),
            low_ns=low,
            high_ns=high,
            assumption=f"sizes that are multiples of 8 save {format_share(SAVED[1])} of these products",
            evidence=(
                f"The products are in {computes_in(profile)}, and {graph.unaligned.num_ops} of them have a"
                " dimension that is no multiple of 8.",
                f"They are {format_share(graph.unaligned.flops / graph.total.flops)} of all arithmetic and"
                f" about {format_share(share)} of the device's time.",
            ),
            fix="Pad sizes to multiples of 8, better of 64: the vocabulary first.",
        )
