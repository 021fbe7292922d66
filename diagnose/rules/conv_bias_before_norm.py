"""Convolutions add a bias that the normalization after them takes away"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_share
from diagnose.rules._device import STREAMING, DeviceRule, busy_ns, sets_the_pace
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import shared
from diagnose.rules.base import WORTH_SHARE

ACCESSES = 3
"""cuDNN's bias is a kernel of its own, which reads and writes the result; its gradient reads another."""

LOW, HIGH = 0.4, 1.6
"""What remains in the cache between two operations is read for nothing."""


def convolutional(biased: int, num_bytes: float, num: int = 20) -> Program:
    model = Model(
        kind="Net",
        num_convolutions=num,
        biased_before_norm=tuple(f"stage.{i}.conv" for i in range(biased)),
    )
    work = Work(num_ops=num, flops=1e12, num_bytes=num_bytes)
    total = Work(num_ops=3 * num, flops=1e12, num_bytes=2 * num_bytes)
    return Program(models=(model,), graph=Graph(num_nodes=200, total=total, convolutions=work))


class ConvBiasBeforeNorm(DeviceRule):
    """
    ## What it means
    A batch normalization subtracts the mean of each channel, and with it any bias that the convolution
    before it has added. The bias is computed, kept and trained for nothing.

    ## What to do
    Build these convolutions with `bias=False`: the results are the same.

    ## When it is wrong
    Weights that were saved with biases no longer load without `strict=False`. The gain is small, and only
    reported where the results of these convolutions are large. On a CPU there is none: the convolution adds
    the bias in passing, and no difference could be measured. It reads the busy share and the bandwidth;
    no run on a GPU has tried it yet.
    """

    needs = ("program.models", "program.graph", "device.bandwidth_bytes_per_s", "device.busy_share")
    fires_on = (
        profile(device=card(), program=convolutional(10, num_bytes=8e9)),
        profile(device=card(), program=convolutional(20, num_bytes=4e9)),
    )
    silent_on = (
        profile(program=convolutional(20, num_bytes=4e9)),
        profile(device=card(), program=convolutional(0, num_bytes=4e9)),
        profile(device=card(), program=convolutional(1, num_bytes=4e9)),
        profile(device=card(), program=convolutional(20, num_bytes=1e8)),
        profile(device=card(busy_share=0.3), program=convolutional(20, num_bytes=4e9)),
    )

    def applies(self, profile: Profile) -> bool:
        return super().applies(profile) and any(
            model.biased_before_norm for model in profile.program.models
        )

    def check(self, profile: Profile) -> Finding | None:
        graph = profile.program.graph
        model = max(profile.program.models, key=lambda model: len(model.biased_before_norm))
        assert graph is not None
        if not model.num_convolutions or not graph.convolutions.num_bytes:
            return None
        part = min(1.0, len(model.biased_before_norm) / model.num_convolutions)
        read_bytes = part * graph.convolutions.num_bytes
        rate = profile.device.bandwidth_bytes_per_s
        assert rate is not None
        lost_ns = min(1e9 * ACCESSES * read_bytes / (STREAMING * rate), 0.5 * busy_ns(profile))
        if lost_ns < WORTH_SHARE * profile.step_time_ns or not sets_the_pace(profile):
            return None
        first, *others = model.biased_before_norm
        return Finding(
            rule=self.name,
            summary=f"{len(others) + 1} convolutions have a bias that the next layer removes.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=HIGH * lost_ns,
            assumption="a bias costs reading the convolution's result, or its gradient, once more",
            evidence=(
                f"{first}{' and others' if others else ''} have a bias and stand directly before a batch"
                " normalization.",
                f"They are {format_share(part)} of the convolutions of {model.kind}.",
            ),
            fix=f"Give {first}{' and the others' if others else ''} bias=False.",
            code="nn.Conv2d(..., bias=False)",
        )
