"""Convolutions add a bias that the normalization after them takes away"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.profile import Profile
from diagnose.core.program import Model, Program
from diagnose.core.units import format_share
from diagnose.rules._compute import BYTES_PER_NS, cost_ns, of_model
from diagnose.rules._device import STREAMING, busy_ns, sets_the_pace, waited
from diagnose.rules._examples import card, profile
from diagnose.rules.base import Rule

READ_ON_CPU = 1
"""The gradient of a bias sums the result's gradient, which is read once more; the sum itself is part of the
convolution."""

READ_ON_DEVICE = 3
"""cuDNN's bias is a kernel of its own, which reads and writes the result; its gradient reads another."""

PASSES = 3
"""A backward pass takes about two forward passes."""

MIN_SHARE = 0.02
LOW, HIGH = 0.4, 1.6
"""What remains in the cache between two operations is read for nothing."""


def convolutional(biased: int, num: int = 20, num_bytes: float = 8e8, flops: float = 5e8) -> Program:
    model = Model(
        kind="Net",
        num_convolutions=num,
        biased_before_norm=tuple(f"stage.{i}.conv" for i in range(biased)),
    )
    work = Work(num_ops=num, flops=flops, num_bytes=num_bytes)
    total = Work(num_ops=3 * num, flops=flops, num_bytes=2 * num_bytes)
    return Program(models=(model,), graph=Graph(num_nodes=200, total=total, convolutions=work))


class ConvBiasBeforeNorm(Rule):
    """
    ## What it means
    A batch normalization subtracts the mean of each channel, and with it any bias that the convolution
    before it has added. The bias is computed, kept and trained for nothing.

    ## What to do
    Build these convolutions with `bias=False`: the results are the same.

    ## When it is wrong
    Weights that were saved with biases no longer load without `strict=False`. The gain is small, and only
    reported where the results of these convolutions are large. On a device it reads the busy share and the
    bandwidth; no run on a GPU has tried that yet.
    """

    needs = ("program.models", "program.graph")
    fires_on = (
        profile(program=convolutional(20)),
        profile(device=card(), program=convolutional(20, num_bytes=4e9)),
    )
    silent_on = (
        profile(program=convolutional(0)),
        profile(program=convolutional(1)),
        profile(program=convolutional(20, flops=1e12)),
        profile(device=card(), program=convolutional(20, num_bytes=1e8)),
        profile(device="cuda", program=convolutional(20)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return any(model.biased_before_norm for model in profile.program.models)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        graph = profile.program.graph
        model = max(profile.program.models, key=lambda model: len(model.biased_before_norm))
        assert graph is not None
        if not model.num_convolutions or not graph.convolutions.num_bytes:
            return None
        part = min(1.0, len(model.biased_before_norm) / model.num_convolutions)
        read_bytes = part * graph.convolutions.num_bytes
        if profile.run.device == "cpu":
            share = READ_ON_CPU * read_bytes / BYTES_PER_NS / (PASSES * cost_ns(graph.total))
            lost = of_model(profile, min(share, 0.5))
        else:
            rate = profile.device.bandwidth_bytes_per_s
            if rate is None or not sets_the_pace(profile):
                return None
            lost_ns = 1e9 * READ_ON_DEVICE * read_bytes / (STREAMING * rate)
            lost = waited(profile, min(lost_ns, 0.5 * busy_ns(profile)))
        lost_ns = sum(lost.values())
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        first, *others = model.biased_before_norm
        return Finding(
            rule=self.name,
            summary=f"{len(others) + 1} convolutions have a bias that the next layer removes.",
            lost_ns=lost,
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
