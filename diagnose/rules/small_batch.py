"""Batches are too small to fill the device, or are trained in small parts"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Calls, Memory, Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._cpus import stretch_of
from diagnose.rules._device import busy_ns, sets_the_pace
from diagnose.rules._examples import GIB, card, profile
from diagnose.rules._phases import shared
from diagnose.rules._supply import main_loader
from diagnose.rules.base import Rule

MAX_SM_SHARE = 0.6
"""Multiprocessors in use below which kernels are too small for the device: TensorBoard's plugin warns at
half, SageMaker at 70 % of utilisation."""

FULL = 0.85
"""A device that is full in practice: the last blocks of each kernel never fill it."""

MOST_MEMORY = 0.9
"""Part of the memory that a larger batch may take."""

LOW, HIGH = 0.3, 1.2
"""Kernels that are short of work for another reason than the batch, such as a short sequence, gain less."""

MIN_SHARE = 0.05

MIN_PARTS = 1.5
"""A batch is trained in parts where it is in so many, in the mean."""

CALL_NS, CONVOLUTION_NS = 40_000, 200_000
"""What an operation, and a convolution besides, takes on a CPU however few samples it is of, forward and
backward together. Measured of models of 15 to 64 operations, 2 to 128 samples, one thread and two, as what
two passes take more than one of twice the samples: 30 to 50 us without convolutions, 50 to 95 us with one
in four operations."""

FIXED_BOUNDS = (0.5, 1.7)
"""Of what these two come to: other machines, and other shapes."""

OF_MEMORY = 0.5
"""Part of the memory that was never used which a pass of a whole batch may take more than one of a part."""

PASSES = (Phase.FORWARD, Phase.BACKWARD)

ON_CPU = ("program.calls", "program.graph")


def in_parts(
    parts: float | None, *, passes: float = 2.0, num_ops: int = 120, num_bytes: float = 4e7
) -> Profile:
    """A run on a CPU whose steps have so many passes, of so many operations and bytes."""
    graph = Graph(num_nodes=2 * num_ops, total=Work(num_ops=num_ops, num_bytes=num_bytes, flops=1e8))
    calls = Calls(num_steps=5, batch_parts=parts, batch_size=32)
    memory = Memory(rss_bytes=GIB, total_bytes=2 * GIB)
    run = profile(step_ms=30, program=Program(graph=graph, calls=calls, memory=memory))
    return replace(run, steps=replace(run.steps, passes=passes))


class SmallBatch(Rule):
    """
    ## What it means
    On a device: a kernel is always running, but on a part of the multiprocessors only. There is not enough
    work in a batch. A larger one would take hardly longer, and memory for it is free.

    On a CPU: a batch is in memory as a whole, the loop cuts it into parts and adds up their gradients, and
    memory for all of it at once is free. Each pass costs what calling its operations takes, however few
    samples it is of. Nothing is said of batches that come one by one.

    ## What to do
    Raise the batch size, and the learning rate with it; or keep the product of both by accumulating fewer
    micro-batches. A batch that is cut into parts: train on it at once, which gives the same gradients.

    ## When it is wrong
    Where the batch must stay small for the result's sake, as parts that are normalized each by itself or
    whose gradients are clipped one by one. Another batch changes the training. On a device it reads the
    busy share, the multiprocessors in use and the peak of memory; no run on a GPU has tried it yet.
    """

    needs = ("device.busy_share", "device.sm_share", "device.total_bytes", "device.peak_bytes", *ON_CPU)
    fires_on = (
        profile(device=card(sm_share=0.3, peak_bytes=10 * GIB)),
        profile(device=card(sm_share=0.55, peak_bytes=30 * GIB)),
        in_parts(2.0),
        in_parts(8.0, passes=8.0, num_ops=40),
    )
    silent_on = (
        profile(device=card()),
        profile(device=card(sm_share=0.3, peak_bytes=70 * GIB)),
        profile(device=card(sm_share=0.3, peak_bytes=10 * GIB, busy_share=0.4)),
        profile(device=card(peak_bytes=10 * GIB)),
        in_parts(None),
        in_parts(None, passes=8.0),
        in_parts(2.0, passes=1.0),
        in_parts(2.0, num_ops=12),
        in_parts(8.0, passes=8.0, num_bytes=2e8),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return profile.run.device != "cpu" or profile.steps.passes > 1

    def needed(self, profile: Profile) -> tuple[str, ...]:
        """See `Rule.needed`."""
        on_cpu = profile.run.device == "cpu"
        return tuple(need for need in self.needs if (need in ON_CPU) == on_cpu)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        return self._in_parts(profile) if profile.run.device == "cpu" else self._on_device(profile)

    def _on_device(self, profile: Profile) -> Finding | None:
        device = profile.device
        filled, total, peak = device.sm_share, device.total_bytes, device.peak_bytes
        assert filled is not None and total is not None and peak is not None
        if not sets_the_pace(profile) or not 0 < filled <= MAX_SM_SHARE or not peak:
            return None
        # All of the peak is taken to grow with the batch; weights do not.
        growth = min(FULL / filled, MOST_MEMORY * total / peak)
        lost_ns = (1 - 1 / growth) * busy_ns(profile) if growth > 1 else 0.0
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        loader = main_loader(profile)
        size = loader.batch_size if loader else None
        return Finding(
            rule=self.name,
            summary=f"A batch fills {format_share(filled)} of the device.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, busy_ns(profile)),
            assumption=f"a batch {growth:.1f} times as large takes as long as one does now",
            evidence=(
                f"Kernels run {format_share(device.busy_share or 0.0)} of the time, on"
                f" {format_share(filled)} of the multiprocessors.",
                f"The peak of memory is {format_bytes(peak)} of {format_bytes(total)}.",
            ),
            fix=f"Raise the batch size{f' from {size} to {int(size * growth)}' if size else ''}.",
            file=loader.file if loader else "",
            line=loader.line if loader else 0,
        )

    def _in_parts(self, profile: Profile) -> Finding | None:
        """Finds that a batch is trained in parts although there is memory for all of it."""
        calls, graph, passes = profile.program.calls, profile.program.graph, profile.steps.passes
        assert calls is not None and graph is not None
        parts = calls.batch_parts
        if parts is None or parts < MIN_PARTS or passes < parts - 0.5:
            return None
        more_bytes, free = (parts - 1) * graph.total.num_bytes, profile.headroom_bytes
        if free is not None and more_bytes > OF_MEMORY * free:
            return None
        saved = passes * (1 - 1 / parts)
        called_ns = CALL_NS * graph.total.num_ops + CONVOLUTION_NS * graph.convolutions.num_ops
        fixed_ns = stretch_of(profile) * called_ns
        # A pass of the whole batch takes as long as one of a part at least.
        most_ns = (1 - 1 / parts) * sum(profile.spent_ns(phase) for phase in PASSES)
        lost_ns = min(saved * fixed_ns, most_ns)
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        size = f", of {calls.batch_size} samples each" if calls.batch_size else ""
        return Finding(
            rule=self.name,
            summary=f"A batch is trained in {parts:.0f} parts{size}, one after the other.",
            lost_ns=shared(profile, lost_ns, PASSES),
            low_ns=FIXED_BOUNDS[0] * lost_ns,
            high_ns=min(FIXED_BOUNDS[1] * lost_ns, most_ns),
            assumption=f"a pass takes {format_ms(fixed_ns)} however few samples it is of",
            evidence=(
                f"A step has {passes:.0f} passes of {graph.total.num_ops} operations,"
                f" {format_ms(sum(map(profile.spent_ns, PASSES)) / passes)} each, forward and backward.",
                f"At once, a pass would need about {format_bytes(more_bytes)} more"
                + (f", of {format_bytes(free)} that were never used." if free is not None else "."),
            ),
            fix="Train on the whole batch at once: its mean loss has the gradients that those of the parts"
            " add up to.",
            file=calls.parts_file,
            line=calls.parts_line,
        )
